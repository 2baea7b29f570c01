"""The algorithm by shape: safe, cheap, equal for all callers, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_muon.engine.layout.work import CPU, CPU_FLOAT32
from titan_muon.engine.orthogonalize import (
    COEFFICIENTS,
    Dispatch,
    Kernel,
    Method,
    coefficients,
    frobenius_norms,
    iteration,
    prepared,
)
from titan_muon.planner.machine import MACHINES

JORDAN = coefficients("keller_jordan", 5)
SHAPES = [(4096, 4096), (1024, 4096), (12288, 4096), (768, 2048), (7168, 18432), (128, 4096)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_auto_selects_gram_neither_in_bfloat16_nor_for_squares(shape: tuple[int, int], dtype: str, device: str) -> None:
    method = Dispatch("auto", dtype, device).choose(*shape, JORDAN)
    if method.algorithm == "gram":
        assert method.dtype != "bfloat16"
        assert max(shape) >= 1.5 * min(shape)
    assert Dispatch("auto", dtype, device).choose(*reversed(shape), JORDAN) == method


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [
        (4096, 4096, "standard float16"),
        (4096, 5120, "standard float16"),
        (12288, 4096, "gram float16 restart 2"),
        (768, 2048, "gram float16 restart 2"),
        (8, 4096, "standard float16"),
    ],
)
def test_gpus_use_gram_for_high_aspect_ratios(rows: int, cols: int, expected: str) -> None:
    assert str(Dispatch(device="cuda").choose(rows, cols, JORDAN)) == expected


def test_auto_avoids_a_float16_that_was_measured_as_unsafe_or_as_much_slower() -> None:
    dispatch = Dispatch(device="cuda", float16=False)
    assert str(dispatch.choose(1024, 4096, JORDAN)) == "standard bfloat16"
    assert Dispatch("auto", "float16", "cuda", float16=False).choose(1024, 4096, JORDAN).dtype == "float16", "asked for"
    # Two measurements are never equal; float16 is the more exact of the two.
    for part, expected in ((0.95, "float16"), (0.5, "bfloat16")):
        machine = replace(MACHINES["h100x8"], flops={"bfloat16": 700e12, "float16": part * 700e12, "float32": 50e12})
        assert Dispatch(device="cuda", gpu=machine.methods).choose(4096, 4096, JORDAN).dtype == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dtype_on_a_cpu_follows_the_instructions(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("avx2", "float32"), ("avx512_bf16", "bfloat16"), ("bf16", "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {"neon": True, name: True})
        assert Dispatch().choose(*shape, JORDAN).dtype == expected


@pytest.mark.parametrize(
    ("rows", "cols", "steps", "expected"),
    [(256, 1024, 5, ()), (257, 1028, 5, (2,)), (256, 1023, 5, (2,)), (128, 4096, 10, (2, 4, 6, 8))],
)
def test_float32_gram_omits_safe_restarts(rows: int, cols: int, steps: int, expected: tuple[int, ...]) -> None:
    method = Dispatch("auto", "float32", "cpu").choose(rows, cols, coefficients("keller_jordan", steps))
    assert (method.algorithm, method.restarts) == ("gram", expected)


@pytest.mark.parametrize("name", ["keller_jordan", "polar_express", "deepseek_v4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_auto_is_never_slower_by_the_model_than_a_choice_by_hand(shape: tuple[int, int], name: str) -> None:
    steps = coefficients(name, 5 if len(COEFFICIENTS[name]) == 1 else len(COEFFICIENTS[name]))
    for machine in MACHINES.values():
        on_cpu = machine.name.startswith("cpu")
        device, bfloat16 = "cpu" if on_cpu else "cuda", machine.name == "cpu"
        auto = Dispatch("auto", "auto", device, cpu_bfloat16=bfloat16, gpu=machine.methods)
        assert auto.rates == machine.methods
        best = auto._seconds(auto.choose(*shape, steps), *shape, steps)
        for algorithm in ("standard", "gram"):
            chosen = replace(auto, algorithm=algorithm).choose(*shape, steps)
            assert best <= auto._seconds(chosen, *shape, steps) or max(shape) < 1.5 * min(shape)


def test_an_automatic_choice_has_a_reason() -> None:
    assert Dispatch(device="cuda").choose(4096, 12288, JORDAN).reason == "1.35 x as fast on a GPU as standard float16"
    assert Dispatch("standard", "bfloat16", "cuda").choose(4096, 12288, JORDAN).reason == ""


def test_a_cpu_has_its_own_rates_whatever_the_planned_machine() -> None:
    for bfloat16, expected in ((True, CPU), (False, CPU_FLOAT32)):
        assert Dispatch(cpu_bfloat16=bfloat16, gpu=MACHINES["b200x8"].methods).rates == expected


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


def test_a_kernel_is_used_from_the_measured_size_for_fitting_sides() -> None:
    kernels = (Kernel("float16", 512, "plain"), Kernel("float16", 2048, "triton"), Kernel("bfloat16", 256, "triton"))
    auto = Dispatch(device="cuda", kernels=kernels)
    products = [auto.choose(rows, 4 * rows, JORDAN).products for rows in (256, 1024, 2048, 4096)]
    assert products == ["plain", "plain", "triton", "triton"]
    assert [auto.choose(*sides, JORDAN).products for sides in ((4096, 4104), (4104, 4096))] == ["plain", "plain"]
    assert str(auto.choose(4096, 4096, JORDAN)) == "standard float16 triton"


class Operators(TorchDispatchMode):
    """Counts the operators with a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.count += not (func.is_view or name.startswith(("empty", "new_empty", "promote_types")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [Method("standard", "float16"), Method("gram", "float16", (2,))], ids=str)
def test_the_operators_of_a_batch_are_counted(method: Method) -> None:
    whole, chosen = torch.zeros(2, 8, 16, dtype=torch.bfloat16, device="meta"), iteration("keller_jordan", 5, 1e-7)
    with Operators() as counter:
        prepared(chosen, method)(whole, norms=frobenius_norms(whole, torch.float16), out=whole)
    # The last product is copied where the number of runs is even.
    assert method.operators(5) <= counter.count <= method.operators(5) + 1
