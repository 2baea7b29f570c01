"""Both iterations on stacks: every set of coefficients, dtype and shape against float64, and the required constants."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.accuracy import orthogonality_error, relative_error, singular_band
from benchmarks.memory_use import allocated
from titan_muon.options import Hyperparameters
from titan_muon.orthogonalize import (
    COEFFICIENTS,
    DTYPES,
    Dispatch,
    Method,
    coefficients,
    frobenius_norms,
    gram,
    iteration,
    orthogonalize,
    reference,
    standard,
    zero_nonfinite_,
)
from titan_muon.orthogonalize.coefficients import PRESCALED
from titan_muon.orthogonalize.dispatch import restarts
from titan_muon.orthogonalize.newton_schulz import normalized, start_norm

STEPS = {name: 5 if len(table) == 1 else len(table) for name, table in COEFFICIENTS.items()}
SHAPES = {"wide": (2, 24, 60), "tall": (2, 60, 24), "square": (2, 32, 32), "row": (3, 1, 40), "one": (1, 20, 48)}
# Every algorithm in every safe dtype.
METHODS = [Method("standard", dtype) for dtype in DTYPES] + [Method("gram", d) for d in ("float16", "float32")]
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


def exact(stack: Tensor, name: str) -> Tensor:
    """The same iteration in float64, on singular values alone."""
    stack = stack.double()
    if name in PRESCALED:
        stack = stack / stack.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        x = stack.mT if stack.size(1) > stack.size(2) else stack
        scale = (x @ x.mT).abs().sum(dim=2, keepdim=True).clamp(min=1e-20) ** -0.5
        stack = (x * scale).mT if stack.size(1) > stack.size(2) else x * scale
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    s = s if name in PRESCALED else s / s.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    for a, b, c in coefficients(name, STEPS[name]):
        s = a * s + b * s**3 + c * s**5
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
@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_a_zero_matrix_stays_zero_and_changes_no_neighbour(name: str, method: Method) -> None:
    stack = drawn(3, 20, 48).float()
    stack[1] = 0
    result = run(stack, name, method)
    assert torch.equal(result[1], torch.zeros(20, 48))
    assert relative_error(result[::2], exact(stack[::2], name)).max() < tolerance(name, method.dtype)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", [(1, 24, 60), (1, 60, 24), (1, 32, 32)], ids=str)
def test_a_rank_one_matrix_keeps_the_singular_vectors(shape: tuple[int, int, int], name: str, method: Method) -> None:
    """The steps amplify small singular values from rounding; the original singular value still approaches 1."""
    _, rows, cols = shape
    u, v = (
        torch.nn.functional.normalize(drawn(rows).float(), dim=0),
        torch.nn.functional.normalize(drawn(cols, seed=1).float(), dim=0),
    )
    result = run(torch.outer(u, v)[None], name, method)[0]
    assert result.isfinite().all()
    assert 0.6 < u @ result @ v < 1.3
    assert torch.linalg.matrix_norm(result, ord=2) < 1.5


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 24, 60), (3, 60, 24)], ids=str)
def test_a_nonfinite_matrix_changes_no_neighbour(shape: tuple[int, int, int], bad: float, method: Method) -> None:
    stack = drawn(*shape).float()
    stack[1, 3, 5] = bad
    result = run(stack, "keller_jordan", method)
    assert result[1].isnan().any()
    assert relative_error(result[::2], exact(stack[::2], "keller_jordan")).max() < TOLERANCES[method.dtype]


@pytest.mark.parametrize("method", [*METHODS, Method("reference", "bfloat16")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_input_is_never_written_to_and_the_result_is_new(shape: str, dtype: torch.dtype, method: Method) -> None:
    stack = drawn(*SHAPES[shape]).to(dtype)
    before = stack.clone()
    result = run(stack, "keller_jordan", method)
    assert torch.equal(stack, before)
    assert result.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr()
    assert result.dtype == (torch.bfloat16 if method.algorithm == "reference" else dtype)


@pytest.mark.parametrize("count", [1, 2, 5], ids="{} steps".format)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_out_accepts_the_input(dtype: torch.dtype, method: Method, count: int) -> None:
    """Equal dtypes work in the input's memory, with the same result."""
    computed = iteration("keller_jordan", count, 1e-7)
    broken = replace(method, restarts=restarts(count) if method.algorithm == "gram" else ())
    for shape in SHAPES.values():
        stack = drawn(*shape).to(dtype)
        expected = orthogonalize(stack, computed, broken)
        assert orthogonalize(stack, computed, broken, out=stack) is stack
        assert torch.equal(stack, expected)


@pytest.mark.parametrize("method", [Method("standard", "float32"), Method("gram", "float32")], ids=str)
def test_in_place_orthogonalization_uses_work_bytes(method: Method) -> None:
    rows, cols, new = 64, 1024, {}
    for out in (torch.float32, torch.bfloat16):
        stack = drawn(1, rows, cols).to(out)
        _, new[out], _ = allocated(
            partial(orthogonalize, stack, iteration([(1.5, -0.5, 0.0)], 3, 1e-7), method, out=stack)
        )
        assert new[out] <= 1.1 * method.work_bytes(rows, cols, "cpu", out.itemsize)
    assert new[torch.float32] <= new[torch.bfloat16] - rows * cols * 4


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_slice_of_a_larger_tensor_is_a_valid_stack(method: Method) -> None:
    """Stacks are views of a workspace, and need not be contiguous."""
    wide = drawn(4, 24, 100)
    stack = wide[1:3, :, 7:67]
    assert torch.equal(run(stack, "keller_jordan", method), run(stack.clone(), "keller_jordan", method))


@pytest.mark.parametrize("scale", [1e-15, 1e-7, 1e4, 1e15])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_no_finite_matrix_overflows_or_vanishes(dtype: str, scale: float) -> None:
    stack = drawn(2, 24, 60)
    computed = iteration("keller_jordan", 5, 1e-35)
    result = orthogonalize(stack.float() * scale, computed, Method("standard", dtype))
    assert result.isfinite().all()
    assert relative_error(result, exact(stack, "keller_jordan")).max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_norm_is_not_rounded_to_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    """Only where the result is bfloat16 too."""
    norms = normalized(drawn(8, 24, 60), 1e-7, dtype).double().norm(dim=(1, 2)) / start_norm(dtype)
    assert (norms - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("method", "factor"), [(Method("standard", "float16"), 0.2), (Method("gram", "float16", (2,)), 2.0)], ids=str
)
def test_float16_keeps_rows_far_below_the_norm(method: Method, factor: float) -> None:
    """From norm 1 the elements would be subnormal numbers, with 8 times the error of bfloat16."""
    stack = drawn(1, 256, 1024).double() * torch.logspace(0, -3, 256, dtype=torch.float64)[:, None]
    stack[:, 0] *= 100
    stack = stack.bfloat16()
    computed = iteration("keller_jordan", 5, 1e-7)
    expected = standard(stack.double(), computed.steps, 1e-7, torch.float64)[:, -32:]
    half, brain = (
        relative_error(orthogonalize(stack.float(), computed, choice)[:, -32:], expected).item()
        for choice in (method, Method("standard", "bfloat16"))
    )
    assert half < factor * brain


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_eps_does_not_shrink_the_update_of_small_gradients(dtype: str) -> None:
    """torch.optim.Muon's 1e-7 does, below a norm of 1e-7."""
    stack = drawn(1, 24, 60).float() * 1e-13
    eps = Hyperparameters().eps
    result = orthogonalize(stack, iteration("keller_jordan", 5, eps), Method("standard", dtype))
    assert singular_band(result)[0].item() > 0.5
    tiny = drawn(1, 24, 60).float() * 1e-24
    result = orthogonalize(tiny, iteration("keller_jordan", 5, eps), Method("standard", dtype))
    assert result.abs().max() < 1e-6, "squares that float32 cannot hold must not make a small matrix large"


def test_the_reference_on_a_stack_equals_the_reference_on_every_matrix() -> None:
    stack = drawn(3, 24, 60)
    steps = coefficients("keller_jordan", 5)
    result = orthogonalize(stack, iteration("keller_jordan", 5, 1e-7), Method("reference", "bfloat16"))
    assert torch.equal(result, torch.stack([reference(matrix, steps, 1e-7) for matrix in stack]))


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
@pytest.mark.parametrize("shape", [(128, 128), (128, 192), (128, 256), (128, 512), (512, 128), (64, 1024)], ids=str)
@pytest.mark.parametrize("spectrum", ["log 1 to 1e-4", "low rank and noise", "gaussian"])
def test_every_default_method_is_as_exact_as_bfloat16(
    spectrum: str, shape: tuple[int, int], name: str, device: str
) -> None:
    """`auto`'s choice for GPUs, run on the CPU: rounded like tensor cores, after float32 sums."""
    stack = hard(spectrum, *shape).bfloat16()[None]
    computed = iteration(name, STEPS[name], 1e-7)
    expected = standard(stack.double(), computed.steps, 1e-7, torch.float64, prescale=computed.prescaled)
    method = Dispatch(device=device).choose(*shape, computed.steps)
    chosen = relative_error(orthogonalize(stack.float(), computed, method), expected)
    baseline = relative_error(orthogonalize(stack.float(), computed, Method("standard", "bfloat16")), expected)
    assert chosen.item() <= baseline.item()


def test_ten_gram_steps_without_restart_diverge() -> None:
    """The guard above would be empty if nothing could go wrong."""
    stack = torch.outer(drawn(128).double(), drawn(512, seed=1).double())[None].float()
    steps = coefficients("deepseek_v4", 10)
    assert not (gram(stack, steps, 1e-7, torch.float32).abs().max() < 1e6)
    assert gram(stack, steps, 1e-7, torch.float32, restarts(10)).abs().max() < 1.5


COUNTED = [
    *METHODS,
    Method("gram", "float32", (2,)),
    Method("gram", "float16", (1, 3)),
    Method("reference", "bfloat16"),
]


@pytest.mark.parametrize("method", COUNTED, ids=str)
@pytest.mark.parametrize("name", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", [(3, 24, 60), (2, 60, 24), (1, 32, 32), (2, 1, 9)], ids=str)
def test_flops_are_counted_from_the_products(shape: tuple[int, int, int], name: str, method: Method) -> None:
    count, rows, cols = shape
    computed = iteration(name, STEPS[name], 1e-7)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(drawn(*shape), computed, method)
    assert counter.get_total_flops() == count * method.flops(rows, cols, computed.steps)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, ()), (3, ()), (4, (2,)), (5, (2,)), (6, (2, 4)), (10, (2, 4, 6, 8))]
)
def test_restarts_come_every_second_step(steps: int, expected: tuple[int, ...]) -> None:
    assert restarts(steps) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_gram_and_standard_agree_for_any_number_of_steps(steps: int) -> None:
    stack, table = drawn(2, 24, 60).double(), coefficients("keller_jordan", steps)
    result, expected = (
        gram(stack, table, 1e-7, torch.float64, restarts(steps)),
        standard(stack, table, 1e-7, torch.float64),
    )
    assert relative_error(result, expected).max() < 1e-9


def test_the_cushioned_set_equals_the_published_set_after_scaling_by_1_02() -> None:
    published = (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        *COEFFICIENTS["polar_express_cushion"][1:],
    )
    stack = drawn(1, 24, 60).double()
    x = stack / (1.02 * stack.norm())
    for a, b, c in published:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result = standard(stack, COEFFICIENTS["polar_express_cushion"], 1e-7, torch.float64)
    assert relative_error(result, x).item() < 1e-12


def test_a_cubic_iteration_converges_to_the_polar_factor() -> None:
    stack = drawn(2, 24, 60).double()
    u, _, vh = torch.linalg.svd(stack, full_matrices=False)
    result = standard(stack, coefficients([(1.5, -0.5, 0.0)], 40), 1e-7, torch.float64)
    assert relative_error(result, u @ vh).max() < 1e-10
    assert orthogonality_error(result).max() < 1e-10
    low, high = singular_band(result)
    assert abs(low.min() - 1) < 1e-10
    assert abs(high.max() - 1) < 1e-10


@pytest.mark.parametrize(("steps", "copies"), [(4, 1), (5, 0)])
def test_a_result_outside_of_the_output_is_copied_on_fake_tensors_too(steps: int, copies: int) -> None:
    """Their addresses are all 0. An odd number of steps ends in the output."""
    with FakeTensorMode():
        stack = torch.empty(2, 8, 16, dtype=torch.bfloat16)
        with Counted() as counted:
            standard(stack, coefficients("keller_jordan", steps), 1e-7, torch.bfloat16, out=stack)
    assert counted.copies == copies


class Counted(TorchDispatchMode):
    """Counts calls of `copy_`."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_orthogonality_error_and_band_detect_a_nonorthogonal_matrix() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0]))
    assert orthogonality_error(matrix).item() == pytest.approx(3 / math.sqrt(2))
    assert [value.item() for value in singular_band(matrix)] == pytest.approx([1, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_zero_nonfinite_clears_and_reports_nonfinite_matrices(bad: float, dtype: torch.dtype) -> None:
    stack = drawn(3, 8, 6).to(dtype) * 100
    before = stack.clone()
    stack[1, 2, 3] = bad
    norms = frobenius_norms(stack, torch.float32)
    assert zero_nonfinite_(stack, norms).tolist() == [False, True, False]
    assert norms.isfinite().all(), "what is divided by them is zero"
    before[1] = 0
    assert torch.equal(stack, before)
