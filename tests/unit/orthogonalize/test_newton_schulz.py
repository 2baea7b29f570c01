"""The iterations on stacks against float64, and the algorithm by shape; kernels, tiles and the symmetric kernel.

Bits of torch: conformance. Kernels run under Triton's interpreter. `make kernels` compiles them.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.accuracy import relative_error, singular_band
from tests.shared import Operators
from titan_muon.engine.orthogonalize import (
    COEFFICIENTS,
    DTYPES,
    Method,
    coefficients,
    frobenius_norms,
    iterate,
    iteration,
    orthogonalize,
    prepared,
)
from titan_muon.engine.orthogonalize.coefficients import Coefficients
from titan_muon.engine.orthogonalize.newton_schulz import plain
from titan_muon.kernels.dispatch import (
    MEASURED,
    Dispatch,
    Kernel,
    has_margin,
    kernels_for,
    largest_values,
    measured_kernels,
    restarts,
)
from titan_muon.options import Expert, OptionError
from titan_muon.planner.machine import MACHINES

STEPS = {name: 5 if len(table) == 1 else len(table) for name, table in COEFFICIENTS.items()}
SHAPES = {"wide": (2, 24, 60), "tall": (2, 60, 24), "square": (2, 32, 32), "row": (3, 1, 40), "one": (1, 20, 48)}
# Every algorithm in every safe dtype.
METHODS = [Method("standard", dtype) for dtype in DTYPES] + [Method("gram", d) for d in ("float16", "float32")]
REFERENCE = Method("reference", "bfloat16")
# Five steps make the rounding of an element (2^-9, 2^-12, 2^-25) some times as much; most where a first step is steep,
# at the singular value 1 of a row.
TOLERANCES = {"bfloat16": 0.15, "float16": 0.02, "float32": 2e-4}


def tolerance(name: str, dtype: str) -> float:
    """CANS amplifies rounding most: the steps are steep up to the singular value 1."""
    return (3 if name == "cans" else 1) * TOLERANCES[dtype]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(torch.bfloat16)


def run(stack: Tensor, name: str, method: Method) -> Tensor:
    computed = iteration(name, STEPS[name], 1e-7)
    broken = restarts(len(computed.steps)) if method.algorithm == "gram" else ()
    return orthogonalize(stack, computed, Method(method.algorithm, method.dtype, broken))


def after(steps: Coefficients, values: Tensor) -> Tensor:
    """Singular values after the steps."""
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


def exact(stack: Tensor, name: str) -> Tensor:
    """The same iteration in float64, on singular values alone."""
    stack = stack.double()
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    s = after(coefficients(name, STEPS[name]), s)
    return (u * s[:, None, :]) @ vh


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_iteration_approximates_float64(shape: str, name: str, method: Method) -> None:
    stack = drawn(*SHAPES[shape])
    result = run(stack.float(), name, method)
    assert result.shape == stack.shape
    assert relative_error(result, exact(stack, name)).max() < tolerance(name, method.dtype)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_zero_or_nonfinite_matrix_changes_no_neighbour(bad: float, method: Method) -> None:
    for name in COEFFICIENTS if bad == 0 else ("keller_jordan",):
        for shape in ((3, 24, 60), (3, 60, 24)):
            stack = drawn(*shape).float()
            stack[1].mul_(0)
            stack[1, 3, 5] = bad
            result = run(stack, name, method)
            assert result[1].isnan().any() if bad else torch.equal(result[1], torch.zeros(shape[1:]))
            assert relative_error(result[::2], exact(stack[::2], name)).max() < tolerance(name, method.dtype)


@pytest.mark.parametrize("method", [*METHODS, REFERENCE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_input_stays_unchanged_unless_it_is_the_output(dtype: torch.dtype, method: Method) -> None:
    """Stacks are views of a workspace, and need not be contiguous. Equal dtypes work in the input's memory."""
    for shape in SHAPES.values():
        for count in (1, 2, 5):
            computed = iteration("keller_jordan", count, 1e-7)
            broken = replace(method, restarts=restarts(count) if method.algorithm == "gram" else ())
            stack = drawn(shape[0], shape[1] + 3, shape[2] + 40).to(dtype)[:, 2:-1, 7:-33]
            before = stack.clone()
            expected = orthogonalize(stack, computed, broken)
            assert torch.equal(stack, before)
            assert expected.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr()
            assert expected.dtype == (torch.bfloat16 if method.algorithm == "reference" else dtype)
            assert torch.equal(orthogonalize(before.clone(), computed, broken), expected)
            assert orthogonalize(stack, computed, broken, out=stack) is stack
            assert torch.equal(stack, expected.to(dtype))


@pytest.mark.parametrize("scale", [1e-15, 1e15])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_no_finite_matrix_overflows_or_vanishes(dtype: str, scale: float) -> None:
    stack = drawn(2, 24, 60)
    computed = iteration("keller_jordan", 5, 1e-35)
    result = orthogonalize(stack.float() * scale, computed, Method("standard", dtype))
    assert relative_error(result, exact(stack, "keller_jordan")).max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_eps_does_not_shrink_the_update_of_small_gradients(dtype: str) -> None:
    """torch.optim.Muon's 1e-7 does, below a norm of 1e-7."""
    computed, method = iteration("keller_jordan", 5, Expert().eps), Method("standard", dtype)
    assert singular_band(orthogonalize(drawn(1, 24, 60).float() * 1e-13, computed, method))[0].item() > 0.5
    tiny = orthogonalize(drawn(1, 24, 60).float() * 1e-24, computed, method)
    assert tiny.abs().max() < 1e-6, "squares that float32 cannot hold must not make a small matrix large"


def hard(spectrum: str, rows: int, cols: int) -> Tensor:
    """A matrix with ill-conditioned singular values."""
    small = min(rows, cols)
    if spectrum == "low rank and noise":
        return drawn(rows, 8).double() @ drawn(8, cols, seed=1).double() + 1e-3 * drawn(rows, cols, seed=2).double()
    if spectrum == "gaussian":
        return drawn(rows, cols).double()
    left, right = (torch.linalg.qr(drawn(n, small, seed=n).double())[0] for n in (rows, cols))
    return (left * torch.logspace(0, -4, small, dtype=torch.float64)) @ right.mT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", [(128, 128), (128, 192), (512, 128), (64, 1024)], ids=str)
@pytest.mark.parametrize("spectrum", ["log 1 to 1e-4", "low rank and noise", "gaussian"])
def test_every_default_method_is_as_exact_as_bfloat16(
    spectrum: str, shape: tuple[int, int], name: str, device: str
) -> None:
    """`auto`'s choice for GPUs, run on the CPU: rounded like tensor cores, after float32 sums."""
    stack = hard(spectrum, *shape).bfloat16()[None]
    computed = iteration(name, STEPS[name], 1e-7)
    expected = iterate(stack.double(), computed.steps, 1e-7, torch.float64)
    method = Dispatch(device=device).choose(*shape, computed.steps)
    chosen = relative_error(orthogonalize(stack.float(), computed, method), expected)
    baseline = relative_error(orthogonalize(stack.float(), computed, Method("standard", "bfloat16")), expected)
    # High-pass sets send these singular values to nearly 0, where float16 has no digits and needs none.
    assert chosen.item() <= max(baseline.item(), 1e-5)


def dominated(ratio: float, *shape: int) -> Tensor:
    """One row has nearly all of the norm."""
    stack = drawn(*shape).float()
    stack[:, 0] *= ratio
    return stack


STACKS = {
    "gaussian": drawn(8, 64, 256).float(),
    "small": drawn(100, 16, 64).float(),
    "smaller": drawn(100, 4, 16).float(),
    "a row": drawn(20, 1, 64).float(),
    "low rank": drawn(2, 64, 4).float() @ drawn(2, 4, 256).float() + 1e-3 * drawn(2, 64, 256).float(),
    "rank one": drawn(2, 64, 1).float() @ drawn(2, 1, 256).float(),
    "a row of 1,000 norms": dominated(1e3, 2, 64, 256),
    "a row of 10,000 norms": dominated(1e4, 2, 64, 256),
    "a tall column": dominated(1e3, 2, 64, 256).mT.contiguous(),
    "nearly orthogonal": torch.linalg.qr(drawn(2, 256, 64).float())[0].mT + 1e-3 * drawn(2, 64, 256).float(),
}


@pytest.mark.parametrize("method", [*METHODS, REFERENCE], ids=str)
@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_no_set_diverges(name: str, method: Method) -> None:
    largest = {what: torch.linalg.matrix_norm(run(s, name, method).float(), 2) for what, s in STACKS.items()}
    assert {what: norms.max().item() for what, norms in largest.items() if not (norms < 1.25).all()} == {}


def split_product(a: Tensor, b: Tensor, c: Tensor | None, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    """A product in four parts, which float16 holds and adds, as cuBLAS may do. `alpha` comes last."""
    total = torch.zeros(a.size(0), a.size(1), b.size(2), dtype=torch.float16)
    for columns, rows in zip(a.split(-(-a.size(2) // 4), dim=2), b.split(-(-b.size(1) // 4), dim=1), strict=True):
        total += torch.matmul(columns.float(), rows.float()).half()
    result = alpha * total.float() + (0 if c is None or beta == 0 else beta * c.float())
    return result.half() if out is None else out.copy_(result)


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_float16_sums_of_partial_products_neither_overflow_nor_lose_digits(
    name: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `auto` takes the Gram iteration for no other shapes.
    long = {what for what, stack in STACKS.items() if {*stack.shape[1:]} == {64, 256}}
    stacks = {what: stack[:4] for what, stack in STACKS.items() if algorithm != "gram" or what in long}
    exact = {what: run(stack, name, Method("standard", "float32")) for what, stack in stacks.items()}
    baseline = {what: run(stack, name, Method("standard", "bfloat16")) for what, stack in stacks.items()}
    limits = {what: relative_error(baseline[what], exact[what]).max().item() + 0.01 for what in stacks}
    monkeypatch.setattr(torch, "bmm", lambda a, b, out=None: split_product(a, b, None, 0, 1, out))
    monkeypatch.setattr(
        torch, "baddbmm", lambda c, a, b, *, beta=1.0, alpha=1.0, out=None: split_product(a, b, c, beta, alpha, out)
    )
    errors = {
        what: relative_error(run(s, name, Method(algorithm, "float16")), exact[what]) for what, s in stacks.items()
    }
    assert {what: error for what, error in errors.items() if not (error < limits[what]).all()} == {}


# Sets of coefficients: the published constants, and the margin for rounding


def test_one_step_is_repeated_and_a_schedule_is_used_unchanged() -> None:
    assert coefficients("keller_jordan", 3) == ((3.4445, -4.7750, 2.0315),) * 3
    assert coefficients("you_jiacheng", 5) == COEFFICIENTS["you_jiacheng"]
    assert coefficients([[1, 2, 3], [4, 5, 6]], 2) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_polar_express_uses_the_papers_steps_and_repeats_the_last_step() -> None:
    steps = coefficients("polar_express", 12)
    assert steps[:5] == COEFFICIENTS["polar_express"]
    assert steps[7:] == ((1.875, -1.25, 0.375),) * 5
    values = torch.logspace(-3, 0, 200, dtype=torch.float64)
    values = after(steps, values)
    assert (values - 1).abs().max() < 1e-12


def test_the_cushioned_set_equals_the_published_set_after_scaling_by_1_02() -> None:
    cushioned = COEFFICIENTS["polar_express_cushion"]
    stack = drawn(1, 24, 60).double()
    x = stack / (1.02 * stack.norm())
    for a, b, c in ((8.156554524902461, -22.48329292557795, 15.878769915207462), *cushioned[1:]):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    assert relative_error(iterate(stack, cushioned, 1e-7, torch.float64), x).item() < 1e-12


@pytest.mark.parametrize(("name", "threshold"), [("pion", math.sqrt(2 / 3)), ("pion_promotion", 0.523)])
def test_pion_keeps_singular_values_above_a_threshold_and_removes_those_below(name: str, threshold: float) -> None:
    """The threshold is the fixed point sqrt(2 / 3) of suppression, or what promotion maps there."""
    steps = coefficients(name, 5)
    assert steps[-1] == (0.0, 5 / 2, -3 / 2)
    assert (steps[0] == (15 / 8, -10 / 8, 3 / 8)) == (name == "pion_promotion")
    values = torch.tensor([0.9 * threshold, 1.1 * threshold, 1.0], dtype=torch.float64)
    values = after((*steps, *steps[-1:] * 5), values)
    assert torch.allclose(values, torch.tensor([0.0, 1.0, 1.0]).double(), atol=1e-3)


@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_the_largest_value_is_the_polynomials_and_every_set_has_twice_the_margin_of_bfloat16(name: str) -> None:
    steps = coefficients(name, STEPS[name])
    values = torch.linspace(0, 1.01, 4001, dtype=torch.float64)
    values = after(steps, values)
    largest = largest_values(steps, 1.01)[-1]
    # Later steps make the peaks of the first ones narrower than the distance of these values.
    assert 0.99 * largest < values.abs().max() <= largest + 1e-9
    assert has_margin(steps, 2 * torch.finfo(torch.bfloat16).eps)
    assert largest_values(((100.0, -1e3, 1e9),) * 9, 1.01)[-1] == math.inf


# The algorithm by shape: safe, cheap, equal for all callers, or refused

JORDAN = coefficients("keller_jordan", 5)
SIZES = [(4096, 4096), (1024, 4096), (12288, 4096), (768, 2048), (7168, 18432), (128, 4096)]
STEEP = ((8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074))
"""CANS as published, without a margin: each step ends where the next begins to diverge."""
BY_SIZE = [(512, 1, "plain"), (512, 16, "triton"), (1024, 1, "plain"), (2048, 4, "triton"), (4096, 1, "triton")]
KERNELS = (*(Kernel("float16", rows, name, n) for rows, n, name in BY_SIZE), Kernel("bfloat16", 256, "triton"))
GPU, ON_CPU = {"device": "cuda"}, {"device": "cpu", "cpu_bfloat16": False}
WITH_KERNELS = {"device": "cuda", "kernels": KERNELS}
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
    (WITH_KERNELS, 256, 1024, JORDAN, "gram float16 restart 2"),
    (WITH_KERNELS, 512, 2048, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (WITH_KERNELS, 1024, 4096, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (WITH_KERNELS, 2048, 8192, JORDAN, "gram float16 restart 2 triton from 4 matrices"),
    (WITH_KERNELS, 4096, 4096, JORDAN, "standard float16 triton"),
    (WITH_KERNELS, 4096, 4104, JORDAN, "standard float16"),
    (WITH_KERNELS, 4104, 4096, JORDAN, "standard float16"),
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


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_the_dtype_on_a_cpu_follows_the_instructions(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("avx2", "float32"), ("avx512_bf16", "bfloat16"), ("bf16", "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {"neon": True, name: True})
        assert Dispatch().choose(*shape, JORDAN).dtype == expected


@pytest.mark.parametrize("name", ["keller_jordan", "polar_express", "deepseek_v4"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
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


# Kernels: the symmetric kernel under Triton's interpreter, and the choice of kernels and tiles

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)
# In a separate process, because triton reads TRITON_INTERPRET at import.
PROGRAM = """
import itertools, torch
from benchmarks.accuracy import relative_error
from titan_muon.engine.orthogonalize import coefficients, iterate
from titan_muon.kernels.dispatch import product_of
from titan_muon.kernels.symmetric import Tile, symmetric_product

TILES = Tile(side=32, depth=32, specialized=True), Tile(side=16, wide=2, depth=16)

def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def check(a, b, c, alpha, beta, tile, tolerance):
    out = torch.full((a.size(0), a.size(1), a.size(1)), float("nan"), dtype=a.dtype)
    symmetric_product(a, b, c, alpha=alpha, beta=beta, out=out, tile=tile)()
    exact = alpha * a.double() @ b.double() + (0 if c is None else beta * c.double())
    assert relative_error(out, exact).max() < tolerance, (a.shape, a.dtype, tile)
    # The mirror tiles are the tiles, also those of a diagonal square.
    assert torch.equal(out, out.mT), (a.shape, a.dtype, tile)

for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    for tile in TILES:
        for (count, size, inner), added, tall in itertools.product(
            ((1, 16, 16), (2, 32, 64), (1, 80, 48)), (False, True), (False, True)
        ):
            x = (drawn(count, inner, size).mT if tall else drawn(count, size, inner)).to(dtype)
            c = drawn(count, size, size, seed=1).to(dtype)
            check(x, x.mT, c + c.mT if added else None, 0.5, -2.0, tile, tolerance)
        r = drawn(2, 48, 48)
        r = (r @ r.mT / 48).to(dtype)
        q = (r.double() @ r.double() - r.double()).to(dtype)
        check(q, r, q, 1.0, 1.5, tile, tolerance)
    stack, steps, triton = drawn(2, 48, 80), coefficients("you_jiacheng", 5), product_of("triton")
    exact = iterate(stack.double(), steps, 1e-7, torch.float64)
    for found in (
        iterate(stack, steps, 1e-7, dtype, (), triton),
        iterate(stack.mT.contiguous(), steps, 1e-7, dtype, (), triton).mT,
        iterate(stack, steps, 1e-7, dtype, (2, 3), triton),
    ):
        assert relative_error(found, exact).max() < 2 * tolerance
"""


@needs_triton
def test_products_approximate_float64_symmetric_bit_for_bit() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_a_gpu_uses_the_tile_of_its_architecture_with_the_earliest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_muon.kernels.symmetric import TILES, tile_on

    # 4,096 rows on 132 processors end first in the second tile.
    for major, processors, size, place in ((9, 132, 8192, 0), (9, 132, 4096, 1), (10, 132, 4096, 1), (9, 148, 4096, 0)):
        gpu = SimpleNamespace(major=major, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert tile_on(torch.device("cuda"), size, 1) == TILES[major][place]
    assert tile_on(torch.device("cpu"), 4096, 1) == TILES[9][1]


def test_every_triton_kernel_is_in_a_compiled_file() -> None:
    folders = ("titan_muon", "models", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = {file.name for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert names == {"symmetric.py", "passes.py"}, "benchmarks/compile_kernels.py does not compile it"


def test_shipped_kernels_are_of_the_named_gpu_and_need_the_kernels_package(tmp_path: Path, monkeypatch: Any) -> None:
    kernels = [{"dtype": "float16", "rows": 256, "products": name} for name in ("plain", "triton")]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"GPU X": {"source": "measured", "kernels": kernels}}))
    for packages in ([], ["triton"]):
        monkeypatch.setattr("titan_muon.kernels.dispatch.installed", lambda packages=packages: packages)
        assert [entry["products"] for entry in measured_kernels("GPU X", file)] == ["plain", *packages]
    assert measured_kernels("GPU Y", file) == []


def test_the_shipped_file_has_measured_entries_of_known_kernels_alone() -> None:
    document = json.loads(MEASURED.read_text())
    assert all(entry["source"] == "measured" for entry in document.values())
    assert {kernel["products"] for entry in document.values() for kernel in entry["kernels"]} <= {"plain", "triton"}


def test_a_gpu_takes_its_measured_kernels_or_refuses_them_and_a_cpu_has_plain_products(monkeypatch: Any) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernels_for("auto", cpu) == kernels_for("plain", cpu) == ()
    monkeypatch.setattr("titan_muon.kernels.dispatch.installed", lambda: ["triton"])
    monkeypatch.setattr("titan_muon.kernels.dispatch.product_of", lambda products: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, products in (("NVIDIA H200", {"plain", "triton"}), ("GPU Y", set())):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert {kernel.products for kernel in kernels_for("auto", cuda)} == products
    # Without a tensor memory accelerator.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(OptionError, match=r"compute capability 9 or 10 .* choose 'auto'"):
        kernels_for("triton", cuda)
