"""muon.expert.fused: two launches for a bucket, with the bits of the foreach operators."""

import importlib.util
import math
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.shared import local, muon_keywords
from titan_muon import Muon, Split, registry
from titan_muon.engine.step.muon import MuonAlgorithm, Tensors
from titan_muon.kernels import batches, fused, tables
from titan_muon.kernels.dispatch import Dispatch
from titan_muon.kernels.tables import BLOCK, Row, Table, ViewPlace
from titan_muon.options import MuonOptions
from titan_muon.selection import select

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: make kernels")
SHAPES = {
    "aligned": (48, 64),
    "wide": (24, 40),
    "same": (24, 40),
    "tall": (33, 20),
    "long": (3, BLOCK + 3),
    "one": (1, 1),
    "experts": (3, 16, 32),
    "odd": (4, 5, 7),
    "qkv": (24, 12),
    "columns": (16, 48),
}
SPLITS = (
    # Interleaved rows, and columns of a weight.
    Split(match="qkv", dims="(g p h) d -> p | (g h) d", lengths={"p": (2, 1, 1), "h": 3}),
    Split(match="columns", dims="d (g f) -> g | f d", lengths={"g": 3}),
)

Change = Callable[[Any, dict[str, nn.Parameter], int], None]
"""Before a step: of the optimizer, of its parameters, in a step."""
Where = tuple[DeviceMesh, Sequence[Placement]] | None


def trained(
    names: Sequence[str],
    change: Change | None = None,
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]] | None = None,
    where: Where = None,
    seed: int = 0,
    steps: int = 3,
    signs: bool = False,
    **options: Any,
) -> list[list[Tensor]]:
    """Traffic, weights and states after each step. Gradients of all steps are kept, so that no address returns.

    Args:
        dtypes: of weights and gradients, by parameter.
        signs: gradients of signs and a momentum of 0.5, so that every sum of squares is exact: kernels add in another
            order.
    """
    generator, kept, results = torch.Generator().manual_seed(seed), [], []
    dtypes = [(torch.float32, torch.float32)] * len(names) if dtypes is None else dtypes

    def drawn(name: str, dtype: torch.dtype, signs: bool = False) -> Tensor:
        values = torch.randn(SHAPES[name], generator=generator)
        values = (values.sign() if signs else values).to(dtype)
        return values if where is None else distribute_tensor(values, *where)

    params = {name: nn.Parameter(drawn(name, dtype)) for name, (dtype, _) in zip(names, dtypes, strict=True)}
    for param, (_, dtype) in zip(params.values(), dtypes, strict=True):
        param.grad_dtype = dtype
    options = {"lr": 0.02, "split": tuple(split for split in SPLITS if split.match in names), **options}
    muon = Muon(list(params.items()), **muon_keywords(**options, **({"momentum": 0.5} if signs else {})))
    for step in range(steps):
        for (name, param), (_, dtype) in zip(params.items(), dtypes, strict=True):
            param.grad = drawn(name, dtype, signs)
            kept.append(param.grad)
        if change is not None:
            change(muon, params, step)
        muon.step()
        traffic = torch.tensor([muon.exchange.traffic.calls, muon.exchange.traffic.bytes_sent])
        states = (local(s) for p in params.values() for s in (p, *muon.state[p].values()) if isinstance(s, Tensor))
        results.append([traffic, *(state.clone() for state in states)])
    return results


def first_difference(one: list[list[Tensor]], other: list[list[Tensor]]) -> int | None:
    """The first step after which two trainings differ. A NaN equals a NaN."""
    for step, pairs in enumerate(zip(one, other, strict=True)):
        if not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*pairs, strict=True)):
            return step
    return None


ROWS = 12 * int(os.environ.get("TITAN_MUON_LONG", "1"))
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
Params = dict[str, nn.Parameter]


@pytest.fixture(autouse=True)
def single_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter computes a fused multiply-add as two operations."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def fma(self: object, x: Any, y: Any, z: Any) -> Any:
        with numpy.errstate(over="ignore", invalid="ignore"):
            wide = x.data.astype(numpy.float64) * y.data.astype(numpy.float64) + z.data.astype(numpy.float64)
            return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


def difference(*names: str, **row: Any) -> int | None:
    """The first step after which kernels and foreach operators differ."""
    kernels, foreach = (trained(names, fused=fused, **row) for fused in (True, False))
    return first_difference(kernels, foreach)


def with_scale(muon: Muon, params: Params, step: int) -> None:
    """As torch.amp.GradScaler, with an overflow in the second step."""
    if step == 1:
        next(iter(params.values())).grad.fill_(math.inf)
    muon.grad_scale, muon.found_inf = torch.tensor(8.0), torch.tensor(float(step == 1))


def with_highest_rate(muon: Muon, params: Params, step: int) -> None:
    for group in muon.param_groups:
        group["max_lr"] = 0.03


def without_gradient(muon: Muon, params: Params, step: int) -> None:
    if step == 1:
        next(iter(params.values())).grad = None


def broken_at_last(muon: Muon, params: Params, step: int) -> None:
    if step == 2:
        next(iter(params.values())).grad[0] = math.nan


def without_the_last(muon: Muon, params: Params, step: int) -> None:
    """The momentum stays, and the owner makes no update."""
    if step == 2:
        params["tall"].grad = None


def elsewhere(muon: Muon, params: Params, step: int) -> None:
    """Another dtype, another order in memory, an address that is not aligned, and another rate."""
    for param, grad in [(param, param.grad) for param in params.values()]:
        memory = torch.empty(grad.numel() + 1, dtype=FLOAT32 if step == 1 else grad.dtype)
        param.grad_dtype = None
        param.grad = memory[1:].view(grad.shape).copy_(grad)
        if step == 2 and grad.ndim == 2:
            param.grad = grad.t().contiguous().t()
    for group in muon.param_groups:
        group["lr"] = 0.01 * (step + 1)


METHODS = [("standard", name) for name in ("float16", "bfloat16", "float32")]
METHODS += [("gram", "float16"), ("gram", "float32")]


def row_of(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    names = draw.sample([*SHAPES], draw.randint(1, 4))
    row: dict[str, Any] = {
        "rounding": draw.choice(("stochastic", "stochastic", "nearest")),
        "cautious": draw.random() < 0.3,
        "nesterov": draw.random() < 0.7,
        "wire_dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
        "state_dtype": draw.choice(("float32", "float32", "bfloat16")),
        "algorithm": draw.choice(("muon", "muon", "normuon", ("muoneq", "normuon"))),
        "offload": draw.choice(("none", "none", "state", "parameters")),
        "adjust_lr_fn": draw.choice(("original", "match_rms_adamw", 0.3)),
        "release_grads": draw.random() < 0.2,
        "weight_decay": 0.1,
        "change": draw.choice((None, None, with_scale, broken_at_last, elsewhere)),
        "dtypes": [(draw.choice((FLOAT32, BFLOAT16)), draw.choice((FLOAT32, BFLOAT16))) for _ in names],
    }
    if {"qkv", "columns"} & {*names}:
        row["offload"] = "none"
    method, ns_dtype = draw.choice((("reference", "auto"), *METHODS))
    method = {"orthogonalize": method, "ns_dtype": ns_dtype, "signs": method != "reference"}
    return {"names": names, "seed": seed, **row, **method}


@needs_interpreter
@pytest.mark.filterwarnings("ignore")
def test_random_rows_have_the_bits_of_the_foreach_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven and tiny matrices, stacks, interleaved rows, cut columns, faults, and every choice of the arithmetic."""
    # The interpreter takes a millisecond for a program.
    monkeypatch.setattr(batches, "PARTS", 4)
    for seed in range(ROWS):
        row = row_of(seed)
        assert difference(*row.pop("names"), **row) is None, row_of(seed)


class Slow(MuonAlgorithm):
    """Another momentum, and the arithmetic of Muon."""

    def decay(self, group: Any) -> float:
        """Half."""
        return 0.5


class OwnSum(MuonAlgorithm):
    """An override of `add`."""

    def add(self, params: Tensors, updates: Tensors, scratch: Tensors, *, call: Any) -> None:
        """Nothing."""


class OwnMomentum(MuonAlgorithm):
    """An override of `before_gather`."""

    def before_gather(self, call: Any, momentum: Tensors, grads: Tensors) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def _own_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in (("own sum", OwnSum), ("own momentum", OwnMomentum), ("slow", Slow)):
        monkeypatch.setitem(registry.algorithms._values, name, made)


@needs_interpreter
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"cautious": True, "decay_follows_lr": True}, with_highest_rate),
        ({"lr": torch.tensor(0.02)}, None),
        ({"momentum_warmup_steps": 2}, None),
        ({"algorithm": "muonh", "weight_decay": 0.0}, None),
        ({"algorithm": "adamuon"}, with_scale),
        ({"algorithm": "soap", "on_bad_gradient": "skip_missing"}, without_gradient),
        ({"algorithm": "soap"}, with_scale),
        ({"algorithm": "slow"}, None),
        ({"idle": "hold"}, None),
        ({"on_bad_gradient": "skip_missing"}, without_gradient),
        ({"on_bad_gradient": "skip_step"}, without_gradient),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_have_the_bits_of_the_foreach_operators(options: dict[str, Any], change: Change | None) -> None:
    method = {} if options.get("algorithm") == "soap" else {"orthogonalize": "reference"}
    assert difference("wide", "experts", change=change, **{"weight_decay": 0.1, **method, **options}) is None


def plan_as_for_gpus(patch: pytest.MonkeyPatch) -> None:
    """Results of products in float16 stay in float16 until the update."""
    patch.setattr(
        "titan_muon.kernels.dispatch.Dispatch", lambda algorithm, dtype, _: Dispatch(algorithm, dtype, "cuda")
    )


@needs_interpreter
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_results_reach_the_update_in_float16(dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PARTS", 4)
    row: dict[str, Any] = {"dtypes": [(dtype, dtype)] * 3, "orthogonalize": method, "ns_dtype": "float16"}
    row |= {"names": ("wide", "tall", "experts"), "signs": True, "weight_decay": 0.1}
    in_bfloat16 = trained(**row, fused=False)
    plan_as_for_gpus(monkeypatch)
    in_float16 = trained(**row, fused=False)
    assert first_difference(in_float16, in_bfloat16) is not None
    # Other digits of the same updates, whose largest elements change a weight by 0.01 in a step.
    pairs = zip(in_float16[-1], in_bfloat16[-1], strict=True)
    assert dtype == BFLOAT16 or all((ours - theirs).abs().max() < 1e-3 for ours, theirs in pairs)
    assert first_difference(trained(**row, fused=True), in_float16) is None


EDGES = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(BFLOAT16).max, 0.0, -0.0])
EDGES[2:3] = torch.tensor([-1], dtype=torch.int32).view(FLOAT32)


@needs_interpreter
@pytest.mark.parametrize("name", ["weight", "update"])
def test_extreme_weights_and_updates_are_rounded_as_by_the_foreach_operators(name: str, monkeypatch: Any) -> None:
    """Infinity, a NaN with all bits set, and a weight that a draw moves to infinity."""
    update = MuonAlgorithm.update

    def update_with_edges(self: MuonAlgorithm, batch: Any, norms: Tensor) -> None:
        update(self, batch, norms)
        batch.whole[0, 0, : len(EDGES)] = EDGES

    def with_edges(muon: Muon, params: Params, step: int) -> None:
        params["wide"].data[0, : len(EDGES)] = EDGES.bfloat16()

    if name == "update":
        monkeypatch.setattr(MuonAlgorithm, "update", update_with_edges)
    row: dict[str, Any] = {"dtypes": [(BFLOAT16, BFLOAT16)], "steps": 1, "weight_decay": 0.1, "wire_dtype": "float32"}
    row |= {"names": ("wide",), "change": with_edges if name == "weight" else None, "orthogonalize": "reference"}
    kernels, foreach = (trained(**row, fused=fused) for fused in (True, False))
    assert first_difference(kernels, foreach) is None
    assert kernels[0][1][0, 2].isnan()


# --- static tables ---


def stored(view: Tensor) -> ViewPlace:
    return ViewPlace.of(0, view, int(view.storage_offset()), view.itemsize)


def row(view: Tensor, first: int = 0) -> Row:
    return Row(*view.shape, 5, 6, first, (stored(view), stored(torch.empty(view.shape))))


def test_a_table_has_each_element_once_and_hints_that_hold() -> None:
    odd, even = torch.empty(5, 7), torch.empty(48, 3 * BLOCK)
    aligned = Table.of([row(even, -1)])
    assert (aligned.flat, aligned.aligned) == (True, True)
    assert aligned.rows.tolist() == [[even.numel(), 3 * BLOCK, 0, 5, 6, -1, *[0, 0, 3 * BLOCK, 1] * 2]]
    several = Table.of([row(odd), row(torch.empty(0, 7)), row(even)])
    assert several.tiles.tolist() == [0] + [1] * 48 * 3
    assert several.rows[:, 2].tolist() == [0, 1], "the first program of a row"
    wide = torch.empty(16, 96)
    for view, flat, is_aligned in [
        (odd, True, False),
        (wide, True, True),
        (wide[:, :32], False, True),
        (wide[:, 1:33], False, False),
        (wide.flatten()[1:65].view(2, 32), True, False),
        (wide[:, ::3], False, False),
        (torch.empty(96, 16).t(), False, False),
    ]:
        made = Table.of([row(view)])
        assert (made.flat, made.aligned) == (flat, is_aligned), view.stride()


def test_rows_of_many_elements_are_cut_with_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs count elements in 32 bits."""
    monkeypatch.setattr(tables, "MOST", 100)
    view = torch.empty(10, 64)[:, :48]
    words = Table.of([row(view, 7)]).rows
    assert words[:, 0].tolist() == [96] * 5
    assert words[:, 5].tolist() == [7 + 96 * part for part in range(5)]
    assert words[:, 7].tolist() == [4 * 64 * 2 * part for part in range(5)]


# --- shards ---


def sharded(rank: int, world_size: int, options: dict[str, Any]) -> list[int | None]:
    mesh, dtype = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner")), options.pop("dtype", FLOAT32)
    row = {"orthogonalize": "auto", "signs": True, "dtypes": [(dtype, dtype)] * 2, **options}
    with pytest.MonkeyPatch.context() as patch:
        single_rounding.__wrapped__(patch)  # type: ignore[attr-defined]
        patch.setattr(batches, "PARTS", 4)
        if "ns_dtype" in options:
            plan_as_for_gpus(patch)
        return [
            difference("wide", "tall", where=(mesh, placements), change=change, **row)
            for placements, change in (
                ([Replicate(), Shard(0)], without_the_last),
                ([Replicate(), Shard(1)], without_the_last),
                ([Shard(0), Replicate()], None),
            )
        ]


@needs_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "all_gather_reduce_scatter", "replicas": "redundant"},
        {"dtype": BFLOAT16, "exchange": "all_gather"},
        {"dtype": BFLOAT16, "orthogonalize": "reference"},
        {},
        {"orthogonalize": "standard", "ns_dtype": "float16"},
        {"dtype": BFLOAT16, "exchange": "all_gather_reduce_scatter", "orthogonalize": "gram", "ns_dtype": "float16"},
    ],
    ids=str,
)
def test_shards_and_replicas_have_the_bits_of_the_foreach_operators(options: dict[str, Any]) -> None:
    assert run_ranks(sharded, 2, options) == [[None] * 3] * 2


# --- choice ---


OWN = "has element-wise arithmetic of its own"
# fmt: off
CHOICES: list[tuple[dict[str, Any], list[dict[str, Any]], torch.dtype, str]] = [
    # Options, groups, the dtype of weights, and why a GPU takes the foreach operators.
    *(({"algorithm": name}, [{}], FLOAT32, "")
      for name in ("muon", "normuon", "adamuon", "soap", "muoneq_both", "muonh", ("muoneq", "adamuon"), "slow")),
    *(({"algorithm": name}, [{}], FLOAT32, OWN) for name in ("own sum", "own momentum")),
    # A parameter with another algorithm decides for all.
    ({}, [{}, {"algorithm": "own sum"}], FLOAT32, OWN),
    ({}, [{}, {"algorithm": "normuon"}], FLOAT32, ""),
    ({"state_dtype": "int8"}, [{}], FLOAT32, "'int8' has a momentum of its own"),
    ({}, [{}], torch.float64, "wider than float32"),
    ({}, [{}], FLOAT16, ""),
]
# fmt: on


@pytest.mark.parametrize(("options", "groups", "dtype", "reason"), CHOICES, ids=str)
def test_a_gpu_takes_kernels_for_muons_arithmetic_and_the_plan_names_the_rest(
    options: dict[str, Any], groups: list[dict[str, Any]], dtype: torch.dtype, reason: str
) -> None:
    tensors, chosen = [torch.zeros(2, 2, dtype=dtype) for _ in groups], MuonOptions(**options)
    on_gpu = select(chosen, groups, tensors, torch.device("cuda"))
    assert (on_gpu.options.fused, on_gpu.note == "") == (not reason, not reason)
    assert reason in on_gpu.note
    assert select(chosen, groups, tensors, torch.device("cpu")).options.fused is False


def test_a_gpu_without_triton_takes_the_foreach_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "usable", lambda kind: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    note = select(MuonOptions(), [{}], [torch.zeros(2, 2)], torch.device("cuda")).note
    assert "the package triton is missing" in note


def test_the_interpreter_does_not_read_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: SimpleNamespace())
    for interpreted, device in (("1", "cpu"), ("0", "cuda")):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        assert {name for name in ("cpu", "cuda", "mps") if fused.usable(name)} == {device}
