"""The iterations on stacks: every set of coefficients, dtype and shape against float64. Bits of torch: conformance."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.accuracy import relative_error, singular_band
from titan_muon.engine.orthogonalize import (
    COEFFICIENTS,
    DTYPES,
    Method,
    coefficients,
    iterate,
    iteration,
    orthogonalize,
)
from titan_muon.engine.orthogonalize.coefficients import Coefficients
from titan_muon.kernels.dispatch import Dispatch, has_margin, largest_values, restarts
from titan_muon.options import Expert

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
