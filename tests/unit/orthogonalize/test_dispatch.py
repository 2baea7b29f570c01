"""The algorithm by shape: safe, cheap, equal for all callers, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.shared import Operators
from titan_muon.engine.orthogonalize import COEFFICIENTS, Method, coefficients, frobenius_norms, iteration, prepared
from titan_muon.engine.orthogonalize.newton_schulz import plain
from titan_muon.kernels.dispatch import Dispatch, Kernel
from titan_muon.planner.machine import MACHINES

JORDAN = coefficients("keller_jordan", 5)
SHAPES = [(4096, 4096), (1024, 4096), (12288, 4096), (768, 2048), (7168, 18432), (128, 4096)]


STEEP = ((8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074))
"""CANS as published, without a margin: each step ends where the next begins to diverge."""
BY_SIZE = [(512, 1, "plain"), (512, 16, "triton"), (1024, 1, "plain"), (2048, 4, "triton"), (4096, 1, "triton")]
KERNELS = (*(Kernel("float16", rows, name, n) for rows, n, name in BY_SIZE), Kernel("bfloat16", 256, "triton"))
GPU, ON_CPU = {"device": "cuda"}, {"device": "cpu", "cpu_bfloat16": False}
MEASURED = {"device": "cuda", "kernels": KERNELS}
TEN = coefficients("keller_jordan", 10)


def at(share: float) -> Any:
    """A GPU whose float16 has a share of the FLOPs of bfloat16."""
    flops = {"bfloat16": 700e12, "float16": share * 700e12, "float32": 50e12}
    return {"device": "cuda", "gpu": replace(MACHINES["h100x8"], flops=flops)}


# fmt: off
CHOICES: list[tuple[dict[str, Any], int, int, Any, str]] = [
    # Options, rows and columns of a matrix, steps, and the method.
    (GPU, 4096, 4096, JORDAN, "standard float16"),
    (GPU, 4096, 5120, JORDAN, "standard float16"),
    (GPU, 12288, 4096, JORDAN, "gram float16 restart 2"),
    (GPU, 768, 2048, JORDAN, "gram float16 restart 2"),
    (GPU, 8, 4096, JORDAN, "standard float16"),
    (GPU, 1024, 4096, STEEP, "gram float32 restart 2"),
    # Two measurements are never equal; float16 is the more exact of the two.
    (at(0.95), 4096, 4096, JORDAN, "standard float16"),
    (at(0.5), 4096, 4096, JORDAN, "standard bfloat16"),
    # A kernel from the measured size and number of matrices on, for sides that fit.
    (MEASURED, 256, 1024, JORDAN, "gram float16 restart 2"),
    (MEASURED, 512, 2048, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (MEASURED, 1024, 4096, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (MEASURED, 2048, 8192, JORDAN, "gram float16 restart 2 triton from 4 matrices"),
    (MEASURED, 4096, 4096, JORDAN, "standard float16 triton"),
    (MEASURED, 4096, 4104, JORDAN, "standard float16"),
    (MEASURED, 4104, 4096, JORDAN, "standard float16"),
    (ON_CPU, 1024, 4096, STEEP, "gram float32 restart 2"),
    # Where float32 is exact enough, restarts are left out.
    (ON_CPU, 256, 1024, JORDAN, "gram float32"),
    (ON_CPU, 257, 1028, JORDAN, "gram float32 restart 2"),
    (ON_CPU, 256, 1023, JORDAN, "gram float32 restart 2"),
    (ON_CPU, 128, 4096, TEN, "gram float32 restart 2,4,6,8"),
    ({"device": "cpu", "cpu_bfloat16": True}, 1024, 4096, STEEP, "gram float32 restart 2"),
]
# fmt: on


@pytest.mark.parametrize(("options", "rows", "cols", "steps", "expected"), CHOICES, ids=range(len(CHOICES)))
def test_the_method_follows_shape_steps_and_measured_rates(
    options: dict[str, Any], rows: int, cols: int, steps: Any, expected: str
) -> None:
    method = Dispatch(**options).choose(rows, cols, steps)
    assert str(method) == expected
    assert " x as fast on " in method.reason, "an automatic choice is printed with the reason"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dtype_on_a_cpu_follows_the_instructions(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("avx2", "float32"), ("avx512_bf16", "bfloat16"), ("bf16", "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {"neon": True, name: True})
        assert Dispatch().choose(*shape, JORDAN).dtype == expected


@pytest.mark.parametrize("name", ["keller_jordan", "polar_express", "deepseek_v4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_auto_is_never_slower_by_the_model_than_a_choice_by_hand(shape: tuple[int, int], name: str) -> None:
    steps = coefficients(name, 5 if len(COEFFICIENTS[name]) == 1 else len(COEFFICIENTS[name]))
    for machine in MACHINES.values():
        on_cpu = machine.name.startswith("cpu")
        device, bfloat16 = "cpu" if on_cpu else "cuda", machine.name == "cpu"
        auto = Dispatch("auto", "auto", device, cpu_bfloat16=bfloat16, gpu=machine)
        assert vars(auto.rates).items() <= vars(machine).items()
        best = auto._seconds(auto.choose(*shape, steps), *shape, steps)
        for algorithm in ("standard", "gram"):
            chosen = replace(auto, algorithm=algorithm).choose(*shape, steps)
            assert best <= auto._seconds(chosen, *shape, steps) or max(shape) < 1.5 * min(shape)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_bounded_and_large_matrices_are_separate(device: str) -> None:
    auto = Dispatch(device=device, cpu_bfloat16=True)
    for rows, cols in [(64, 64), (128, 512), (768, 2048), (2048, 7168)]:
        method = auto.choose(rows, cols, JORDAN)
        used = method.batch * method.work_bytes(rows, cols, device)
        assert method.batch == 1 or used <= auto.rates.batch_bytes
        assert (method.batch + 1) * method.work_bytes(rows, cols, device) > auto.rates.batch_bytes
    assert auto.choose(8192, 28672, JORDAN).batch == 1
    reference = Dispatch("reference", device=device).choose(64, 64, JORDAN)
    assert (reference.algorithm, reference.dtype, reference.batch > 1) == ("reference", "bfloat16", device == "cuda")


def test_fewer_matrices_than_measured_have_plain_products() -> None:
    made: list[int] = []
    counted = lambda a, *rest, **options: made.append(len(a)) or plain(a, *rest, **options)  # noqa: E731
    method = Method("standard", "float32", products="triton", fewest=3, product=counted)
    for count in (2, 3):
        prepared(iteration("keller_jordan", 5, 1e-7), method, count)(torch.randn(count, 16, 16))
    assert set(made) == {3}


@pytest.mark.parametrize("method", [Method("standard", "float16"), Method("gram", "float16", (2,))], ids=str)
def test_the_operators_of_a_batch_are_counted(method: Method) -> None:
    whole, chosen = torch.zeros(2, 8, 16, dtype=torch.bfloat16, device="meta"), iteration("keller_jordan", 5, 1e-7)
    with Operators() as counter:
        prepared(chosen, method, 2)(whole, norms=frobenius_norms(whole, torch.float16), out=whole)
    allocations = ("aten::empty", "aten::new_empty", "aten::promote_types")
    launched = {f: n for f, n in counter.counts.items() if not (f.is_view or f._schema.name.startswith(allocations))}
    # The last product is copied where the number of runs is even.
    assert method.operators(5) <= sum(launched.values()) <= method.operators(5) + 1
