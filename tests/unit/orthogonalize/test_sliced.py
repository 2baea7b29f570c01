"""Several ranks orthogonalize slices of a matrix; threads of a process are the ranks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.accuracy import relative_error
from tests.unit.orthogonalize.test_newton_schulz import STEPS, TOLERANCES, drawn, exact, hard, tolerance
from titan_muon.orthogonalize import (
    COEFFICIENTS,
    Dispatch,
    Iteration,
    Method,
    TeamSlice,
    iteration,
    orthogonalize,
    sliced_norms,
)
from titan_muon.orthogonalize.newton_schulz import wide_gram

T = TypeVar("T")


class Threads:
    """A Team of threads with a count of the traffic of rings."""

    def __init__(self, board: list[Tensor], barrier: Barrier, place: int) -> None:
        self.place, self._board, self._barrier = place, board, barrier
        self.sent = self.calls = 0

    def _exchanged(self, mine: Tensor) -> list[Tensor]:
        self.calls += 1
        self._board[self.place] = mine.clone()
        self._barrier.wait(10)
        board = list(self._board)
        self._barrier.wait(10)
        return board

    def summed(self, whole: Tensor) -> Tensor:
        size = len(self._board)
        self.sent += whole.numel() * whole.element_size() * (size - 1) // size
        return torch.stack(self._exchanged(whole)).sum(0).chunk(size)[self.place]

    def gathered(self, part: Tensor) -> Tensor:
        self.sent += part.numel() * part.element_size() * (len(self._board) - 1)
        return torch.cat(self._exchanged(part))


def on_each(size: int, run: Callable[[Threads], T]) -> tuple[list[T], list[Threads]]:
    """Results of all ranks of a team."""
    board, barrier = [torch.empty(0)] * size, Barrier(size)
    teams = [Threads(board, barrier, place) for place in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, teams)), teams


def run_sliced(matrix: Tensor, computed: Iteration, method: Method) -> Tensor:
    """The whole result of the slices of a matrix (rows, cols)."""
    rows = matrix.size(0) >= matrix.size(1)
    parts = matrix.chunk(method.slices, 0 if rows else 1)
    slices, _ = on_each(
        method.slices,
        lambda team: orthogonalize(parts[team.place][None], computed, method, of=TeamSlice(team, rows))[0],
    )
    return torch.cat(slices, 0 if rows else 1)


def method_for(algorithm: str, dtype: str, slices: int, shape: Sequence[int], name: str) -> Method:
    steps = iteration(name, STEPS[name], 1e-7).steps
    return Dispatch(algorithm, dtype, cpu_bfloat16=True).choose(shape[0], shape[1], steps, slices)


METHODS = [("standard", dtype) for dtype in TOLERANCES] + [("gram", "float16"), ("gram", "float32")]


@pytest.mark.parametrize(("algorithm", "dtype"), METHODS)
@pytest.mark.parametrize("name", sorted(COEFFICIENTS))
def test_the_iteration_on_slices_approximates_float64(name: str, algorithm: str, dtype: str) -> None:
    for shape, slices in (((24, 64), 2), ((64, 24), 8), ((32, 32), 4)):
        stack, method = drawn(1, *shape), method_for(algorithm, dtype, slices, shape, name)
        result = run_sliced(stack[0].float(), iteration(name, STEPS[name], 1e-7), method)
        assert relative_error(result, exact(stack, name)[0]) < tolerance(name, dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["keller_jordan", "polar_express", "deepseek_v4"])
@pytest.mark.parametrize(("shape", "slices"), [((64, 256), 2), ((256, 64), 8), ((128, 128), 4)], ids=str)
@pytest.mark.parametrize("spectrum", ["log 1 to 1e-4", "low rank and noise", "gaussian"])
def test_slices_are_as_exact_as_the_default_choice_for_the_whole(
    spectrum: str, shape: tuple[int, int], name: str, device: str, slices: int
) -> None:
    stack = hard(spectrum, *shape).bfloat16()[None]
    computed, expected = iteration(name, STEPS[name], 1e-7), exact(stack, name)[0]
    dispatch = Dispatch(device=device, cpu_bfloat16=True)
    whole = orthogonalize(stack.float(), computed, dispatch.choose(*shape, computed.steps))[0]
    result = run_sliced(stack[0].float(), computed, dispatch.choose(*shape, computed.steps, slices))
    # Sums in another order round differently, by chance up or down.
    assert relative_error(result, expected) < 1.08 * relative_error(whole, expected)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize(("algorithm", "dtype"), [("standard", "bfloat16"), ("gram", "float16"), ("gram", "float32")])
@pytest.mark.parametrize("name", ["keller_jordan", "deepseek_v4", "cubic"])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16)], ids=str)
def test_flops_bytes_and_calls_equal_the_plan(
    shape: tuple[int, int], name: str, algorithm: str, dtype: str, slices: int
) -> None:
    cubic = name == "cubic"
    computed = iteration([(1.5, -0.5, 0.0)], 5, 1e-7) if cubic else iteration(name, STEPS[name], 1e-7)
    chosen = method_for(algorithm, dtype, slices, shape, "keller_jordan" if cubic else name)
    method, rows = chosen, shape[0] >= shape[1]
    parts = drawn(1, *shape).chunk(slices, 1 if rows else 2)

    def run(team: Threads) -> int:
        with FlopCounterMode(display=False) as counter:
            orthogonalize(parts[team.place], computed, method, of=TeamSlice(team, rows))
        return counter.get_total_flops()

    flops, teams = on_each(slices, run)
    planned = method.team(*shape, computed.steps)
    assert planned is not None, "a slice has a team"
    assert flops == [method.flops(*shape, computed.steps)] * slices
    whole = Method(algorithm, dtype, method.restarts)
    assert slices * flops[0] == whole.flops(*shape, computed.steps), "no product is made twice"
    assert [(team.sent, team.calls) for team in teams] == [(planned.sent, planned.calls)] * slices


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_every_rank_has_the_norm_of_the_whole_matrix(scale: float) -> None:
    stack = drawn(1, 64, 16).float() * scale
    norms, _ = on_each(4, lambda team: sliced_norms(stack.chunk(4, 1)[team.place], team))
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0], torch.linalg.vector_norm(stack.double()).float()[None])
    stack[0, 20, 3] = stack[0, 60, 3] = 1e30
    norms, _ = on_each(4, lambda team: sliced_norms(stack.chunk(4, 1)[team.place], team))
    assert not any(norm.isfinite() for norm in norms)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gram_matrix_is_float32_for_every_dtype(dtype: torch.dtype, device: str) -> None:
    """On meta, by the GPU's operator."""
    gram = wide_gram(torch.zeros(4, 8, dtype=dtype, device=device))
    assert (gram.shape, gram.dtype) == ((4, 4), torch.float32)
