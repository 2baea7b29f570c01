"""muon.expert.fused: two launches for a bucket, with the bits of the foreach operators.

Kernels run under Triton's interpreter, with fused multiply-adds that round once, as on GPUs and in PyTorch's vectors.
"""

import importlib.util
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.shared import equal, muon_keywords
from titan_muon import Expert, Muon, Split, registry
from titan_muon.engine.orthogonalize import Dispatch
from titan_muon.engine.step.muon import MuonAlgorithm, Tensors
from titan_muon.kernels import batches, fused, tables
from titan_muon.kernels.launch import TableLaunch
from titan_muon.kernels.tables import BLOCK, Row, Table, ViewPlace, view_place
from titan_muon.options import MuonOptions
from titan_muon.selection import algorithm_of, select

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: make kernels")
ROWS = 12 * int(os.environ.get("TITAN_MUON_LONG", "1"))
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
STEPS = 3
SHAPES = {
    "aligned": (48, 64),
    "wide": (24, 40),
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


# --- training ---


Change = Callable[[Muon, list[nn.Parameter], int], None]
"""Before a step: of the optimizer, of its parameters, in a step."""


def with_scale(muon: Muon, params: list[nn.Parameter], step: int) -> None:
    """As torch.amp.GradScaler, with an overflow in the second step."""
    if step == 1:
        params[0].grad = torch.full_like(params[0].grad, math.inf)
    muon.grad_scale, muon.found_inf = torch.tensor(8.0), torch.tensor(float(step == 1))


def with_highest_rate(muon: Muon, params: list[nn.Parameter], step: int) -> None:
    for group in muon.param_groups:
        group["max_lr"] = 0.03


def without_gradient(muon: Muon, params: list[nn.Parameter], step: int) -> None:
    if step == 1:
        params[0].grad = None


def broken_at_last(muon: Muon, params: list[nn.Parameter], step: int) -> None:
    if step == STEPS - 1:
        params[0].grad[0] = math.nan


def elsewhere(muon: Muon, params: list[nn.Parameter], step: int) -> None:
    """Another dtype, another order in memory, an address that is not aligned, and another rate."""
    for param, grad in zip(params, [param.grad for param in params], strict=True):
        memory = torch.empty(grad.numel() + 1, dtype=FLOAT32 if step == 1 else grad.dtype)
        param.grad_dtype = None
        param.grad = memory[1:].view(grad.shape).copy_(grad)
        if step == 2 and grad.ndim == 2:
            param.grad = grad.t().contiguous().t()
    for group in muon.param_groups:
        group["lr"] = 0.01 * (step + 1)


def trained(
    names: list[str],
    dtypes: list[tuple[torch.dtype, torch.dtype]],
    seed: int,
    change: Change | None = None,
    **options: Any,
) -> list[Tensor]:
    """Weights and momentum after some steps. `dtypes`: of weights and gradients, by parameter."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, signs: bool = False) -> Tensor:
        values = torch.randn(SHAPES[name], generator=generator)
        return values.sign() if signs else values

    params = []
    for name, (weight, grad) in zip(names, dtypes, strict=True):
        params.append(nn.Parameter(drawn(name).to(weight)))
        params[-1].grad_dtype = grad
    # Signs and a momentum of 0.5, so that every sum of squares is exact: kernels add in another order.
    signs = options.get("orthogonalize", "reference") != "reference"
    options |= {"momentum": 0.5} if signs else {}
    keywords = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "orthogonalize": "reference",
        "split": tuple(split for split in SPLITS if split.match in names),
        **options,
    }
    muon = Muon(list(zip(names, params, strict=True)), **muon_keywords(**keywords))
    for step in range(STEPS):
        for name, param, (_, dtype) in zip(names, params, dtypes, strict=True):
            param.grad = drawn(name, signs).to(dtype)
        if change is not None:
            change(muon, params, step)
        muon.step()
    return [tensor.detach() for param in params for tensor in (param, muon.state[param]["momentum_buffer"])]


METHODS = [("standard", name) for name in ("float16", "bfloat16", "float32")]
METHODS += [("gram", "float16"), ("gram", "float32")]


def row_of(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    names = draw.sample([*SHAPES], draw.randint(1, 4))
    options: dict[str, Any] = {
        "rounding": draw.choice(("stochastic", "stochastic", "nearest")),
        "cautious": draw.random() < 0.3,
        "nesterov": draw.random() < 0.7,
        "wire_dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
        "state_dtype": draw.choice(("float32", "float32", "bfloat16")),
        "algorithm": draw.choice(("muon", "muon", "normuon", ("muoneq", "normuon"))),
        "offload": draw.choice(("none", "none", "state", "parameters")),
        "adjust_lr_fn": draw.choice(("original", "match_rms_adamw", 0.3)),
        "release_grads": draw.random() < 0.2,
    }
    options |= draw.choice(({}, *(dict(zip(("orthogonalize", "ns_dtype"), method, strict=True)) for method in METHODS)))
    if any(name in ("qkv", "columns") for name in names):
        options["offload"] = "none"
    changes = [None, None, with_scale, broken_at_last, elsewhere]
    dtypes = [(draw.choice((FLOAT32, BFLOAT16)), draw.choice((FLOAT32, BFLOAT16))) for _ in names]
    return {"names": names, "dtypes": dtypes, "seed": seed, "change": draw.choice(changes), **options}


@needs_interpreter
@pytest.mark.filterwarnings("ignore")
def test_random_rows_have_the_bits_of_the_foreach_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven and tiny matrices, stacks, interleaved rows, cut columns, faults, and every choice of the arithmetic."""
    # The interpreter takes a millisecond for a program.
    monkeypatch.setattr(batches, "PARTS", 4)
    for seed in range(ROWS):
        row = row_of(seed)
        foreach, kernels = trained(**row, fused=False), trained(**row, fused=True)
        assert all(map(same, kernels, foreach)), row


def same(ours: Tensor, theirs: Tensor) -> bool:
    return bool(torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)))


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
        ({"idle": "hold"}, None),
        ({"on_bad_gradient": "skip_missing"}, without_gradient),
        ({"on_bad_gradient": "skip_step"}, without_gradient),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_have_the_bits_of_the_foreach_operators(options: dict[str, Any], change: Change | None) -> None:
    row: dict[str, Any] = {
        "names": ["wide", "experts"],
        "dtypes": [(FLOAT32, FLOAT32)] * 2,
        "seed": 0,
        "change": change,
    }
    assert equal(trained(**row, **options, fused=True), trained(**row, **options, fused=False))


def plan_as_for_gpus(patch: pytest.MonkeyPatch) -> None:
    """Results of products in float16 stay in float16 until the update."""
    patch.setattr("titan_muon.selection.Dispatch", lambda algorithm, dtype, _: Dispatch(algorithm, dtype, "cuda"))


@needs_interpreter
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_results_reach_the_update_in_float16(dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PARTS", 4)
    names, options = ["wide", "tall", "experts"], {"orthogonalize": method, "ns_dtype": "float16"}
    row: dict[str, Any] = {"names": names, "dtypes": [(dtype, dtype)] * 3, "seed": 0, **options}
    in_bfloat16 = trained(**row, fused=False)
    plan_as_for_gpus(monkeypatch)
    in_float16 = trained(**row, fused=False)
    assert not equal(in_float16, in_bfloat16)
    # Other digits of the same updates, whose largest elements change a weight by 0.01 in a step.
    pairs = zip(in_float16, in_bfloat16, strict=True)
    assert dtype == BFLOAT16 or all((ours - theirs).abs().max() < 1e-3 for ours, theirs in pairs)
    assert equal(trained(**row, fused=True), in_float16)


@needs_interpreter
@pytest.mark.parametrize("name", ["weight", "update"])
def test_extreme_weights_and_updates_are_rounded_as_by_the_foreach_operators(name: str, monkeypatch: Any) -> None:
    """Infinity, a NaN with all bits set, and a weight that a draw moves to infinity."""
    edges = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(BFLOAT16).max, 0.0, -0.0])
    edges[2:3] = torch.tensor([-1], dtype=torch.int32).view(FLOAT32)
    results = []
    update = MuonAlgorithm.update

    def with_edges(self: MuonAlgorithm, batch: Any, norms: Tensor) -> None:
        update(self, batch, norms)
        batch.whole[0, 0, : len(edges)] = edges

    if name == "update":
        monkeypatch.setattr(MuonAlgorithm, "update", with_edges)
    for kernels in (False, True):
        param = nn.Parameter(torch.ones(16, 24, dtype=BFLOAT16))
        if name == "weight":
            param.data[0, : len(edges)] = edges.bfloat16()
        expert = Expert(fused=kernels, wire_dtype="float32", orthogonalize="reference")
        muon = Muon([("w", param)], lr=0.02, weight_decay=0.1, expert=expert)
        param.grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
        muon.step()
        results.append(param.detach())
    assert same(*results)
    assert results[0][0, 2].isnan()


# --- static tables ---


@needs_interpreter
def test_a_local_bucket_has_four_launches_and_no_step_makes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, made = Counter[tuple[int, str]](), Counter[int]()
    now = 0  # The step; 0 before.
    run, of = TableLaunch.run, Table.of

    def counted(launch: TableLaunch, *rest: Any) -> None:
        launches[now, launch.kernel] += 1
        run(launch, *rest)

    monkeypatch.setattr(TableLaunch, "run", counted)
    monkeypatch.setattr(Table, "of", lambda rows: made.update([now]) or of(rows))
    params = {f"{n}": nn.Parameter(torch.randn(*shape)) for n, shape in enumerate([(64, 48)] * 3 + [(16, 16)] * 4)}
    # Results in the dtype of the products.
    muon = Muon(list(params.items()), expert=Expert(fused=True, ns_dtype="bfloat16")).build()
    for now in range(1, 4):  # noqa: B007
        for tensor in params.values():
            tensor.grad = torch.randn(tensor.shape, dtype=tensor.dtype)
        muon.step()
    buckets = len(muon.engine.step.views)
    kernels = "advance", "norm_parts", "normalize", "update"
    assert launches == {(now, kernel): buckets for now in range(1, 4) for kernel in kernels}
    assert made == {0: 3 * buckets}


def stored(view: Tensor) -> ViewPlace:
    return view_place(0, view, int(view.storage_offset()), view.itemsize)


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


PLACEMENTS = {"rows": [Replicate(), Shard(0)], "columns": [Replicate(), Shard(1)], "replicas": [Shard(0), Replicate()]}


def sharded(dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """This rank's weights and momenta after some steps."""
    mesh, results = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner")), list[Tensor]()
    for name, placements in PLACEMENTS.items():
        generator = torch.Generator().manual_seed(0)
        new = lambda shape: distribute_tensor(  # noqa: E731
            torch.randn(shape, generator=generator).sign().to(dtype),  # noqa: B023
            mesh,
            placements,  # noqa: B023
        )
        params = {shape: nn.Parameter(new(shape)) for shape in ((24, 40), (33, 20))}
        muon = Muon([(str(shape), param) for shape, param in params.items()], **muon_keywords(**options))
        for step in range(STEPS):
            for shape, param in params.items():
                param.grad = new(shape)
            if step == STEPS - 1 and name != "replicas":
                # The momentum stays, and the owner makes no update.
                params[33, 20].grad = None
            muon.step()
        for param in params.values():
            results += [param.to_local().detach(), muon.state[param]["momentum_buffer"].to_local()]
    return results


def sharded_twice(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        single_rounding.__wrapped__(patch)  # type: ignore[attr-defined]
        patch.setattr(batches, "PARTS", 4)
        if "ns_dtype" in options:
            plan_as_for_gpus(patch)
        kernels, foreach = (
            sharded(dtype, {"lr": 0.02, "momentum": 0.5, "fused": on, **options}) for on in (True, False)
        )
    return equal(kernels, foreach)


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (FLOAT32, {"exchange": "all_gather_reduce_scatter", "replicas": "redundant"}),
        (BFLOAT16, {"exchange": "all_gather"}),
        (BFLOAT16, {"orthogonalize": "reference"}),
        (FLOAT32, {}),
        (FLOAT32, {"orthogonalize": "standard", "ns_dtype": "float16"}),
        (BFLOAT16, {"exchange": "all_gather_reduce_scatter", "orthogonalize": "gram", "ns_dtype": "float16"}),
    ],
    ids=str,
)
def test_shards_and_replicas_have_the_bits_of_the_foreach_operators(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert run_ranks(sharded_twice, 2, dtype, options) == [True, True]


# --- choice ---


class OwnSum(MuonAlgorithm):
    """An override of `add`."""

    def add(self, params: Tensors, updates: Tensors, scratch: Tensors, *, call: Any) -> None:
        """Nothing."""


class OwnMomentum(MuonAlgorithm):
    """An override of `before_gather`."""

    def before_gather(self, call: Any, momentum: Tensors, grads: Tensors) -> None:
        """Nothing."""


class Slow(MuonAlgorithm):
    """Another momentum, and the arithmetic of Muon."""

    def decay(self, group: Any) -> float:
        """Half."""
        return 0.5


OWN = "has element-wise arithmetic of its own"
CHOICES: list[tuple[dict[str, Any], torch.dtype, str]] = [
    *(
        ({"algorithm": name}, FLOAT32, "")
        for name in ("muon", "normuon", "adamuon", "soap", "muoneq_both", "muonh", ("muoneq", "adamuon"), "slow")
    ),
    *(({"algorithm": name}, FLOAT32, OWN) for name in ("own sum", "own momentum")),
    ({"state_dtype": "int8"}, FLOAT32, "'int8' has a momentum of its own"),
    ({}, torch.float64, "wider than float32"),
    ({}, FLOAT16, ""),
]


@pytest.fixture
def with_own_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, of in (("own sum", OwnSum), ("own momentum", OwnMomentum), ("slow", Slow)):
        monkeypatch.setitem(registry.algorithms._values, name, of)


@pytest.mark.usefixtures("with_own_algorithms")
@pytest.mark.parametrize(("options", "dtype", "reason"), CHOICES, ids=str)
def test_a_gpu_takes_kernels_for_muons_arithmetic_and_the_plan_names_the_rest(
    options: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    tensors, chosen = [torch.zeros(2, 2, dtype=dtype)], MuonOptions(**options)
    on_gpu = select(chosen, [{}], tensors, torch.device("cuda"))
    assert (on_gpu.options.fused, on_gpu.note == "") == (not reason, not reason)
    assert reason in on_gpu.note
    assert select(chosen, [{}], tensors, torch.device("cpu")).options.fused is False


@pytest.mark.usefixtures("with_own_algorithms")
def test_a_parameter_with_another_algorithm_decides_for_all() -> None:
    options, groups = MuonOptions(), [{}, {"algorithm": "own sum"}]
    algorithm = algorithm_of(options, groups)
    assert OWN in fused.foreach_reason(options, algorithm, [torch.zeros(2, 2)] * 2)
    assert (
        fused.foreach_reason(options, algorithm_of(options, [{}, {"algorithm": "normuon"}]), [torch.zeros(2, 2)] * 2)
        == ""
    )


def test_a_gpu_without_triton_takes_the_foreach_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "usable", lambda kind: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert (
        "the package triton is missing" in select(MuonOptions(), [{}], [torch.zeros(2, 2)], torch.device("cuda")).note
    )


@pytest.mark.usefixtures("with_own_algorithms")
def test_the_kernels_get_the_momentum_of_their_own_algorithm() -> None:
    params = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [("a", params[0])]}, {"params": [("b", params[1])], "algorithm": "slow"}]
    muon = Muon(groups, expert=Expert(fused=False)).build()
    rank, views = muon.engine.rank, muon.engine.step.views
    with muon.engine.workspace.held():
        kernels = fused.Kernels(rank, views, algorithm_of(rank.options, muon.param_groups))
    numbers = [kernels._numbers_of(*of) for of in kernels._numbers.values()]
    assert sorted(row[1] for row in numbers) == [tables.bits(0.5), tables.bits(0.95)]


def test_the_interpreter_does_not_read_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: SimpleNamespace())
    for interpreted, device in (("1", "cpu"), ("0", "cuda")):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        usable = {name for name in ("cpu", "cuda", "mps") if fused.usable(name)}
        assert usable == {device}
