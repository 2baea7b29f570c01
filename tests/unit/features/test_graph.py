"""muon.expert.cuda_graph: the operators of a step, from its first bucket to its last, are those of the step before."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.rehearsal.fake_gpu import FakeGpu, fake_gpu, fake_rank
from tests.shared import message, muon_keywords
from titan_muon import Expert, Hybrid, Muon, preview, registry
from titan_muon.engine.step.muon import MuonAlgorithm
from titan_muon.engine.step.step import MuonStep
from titan_muon.kernels import graph
from titan_muon.kernels.batches import TableLaunch
from titan_muon.kernels.fused import Kernels
from titan_muon.options import HYPERPARAMETERS, SHARED, Machine, OptionError, Split
from titan_muon.plugins.clip import NormCheck

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = {"a": (64, 64), "b": (64, 64), "tall": (128, 64), "wide": (32, 96), "odd": (33, 21)}
STEPS = 4


class Sequence(TorchDispatchMode):
    """The operators, launches and resized storages of the buckets of each step, in `steps`.

    A tensor is its shape and its memory: a number for memory that the step allocates, else the storage itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Any]] = []
        self._made: dict[int, int] = {}
        self._kept: list[Any] = []
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._is_inside:
            known = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for tensor in (t for t in tree_leaves(result) if isinstance(t, Tensor)):
                self._kept.append(tensor)
                if _memory(tensor) not in known:
                    self._made.setdefault(_memory(tensor), len(self._made))
            self.add(str(func), args, kwargs)
        return result

    def add(self, name: str, *operands: Any) -> None:
        if self._is_inside:
            self._kept.append(operands)
            self.steps[-1].append((name, tree_map(self._described, operands)))

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.ScriptObject):
            # A process group, or a reduction.
            return str(type(value))
        if not isinstance(value, Tensor):
            return repr(value)
        place = self._made.get(_memory(value), value.untyped_storage()._cdata)
        return place, value.storage_offset(), value.shape, value.stride(), value.dtype, value.device.type

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.steps.append([])
        self._made, self._is_inside = {}, True
        yield
        self._is_inside = False


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def recorded() -> Iterator[tuple[FakeGpu, Sequence]]:
    """Eager steps on a fake GPU."""
    sequence, run, resize = Sequence(), MuonStep.run, torch.UntypedStorage.resize_

    def in_sequence(step: MuonStep, gradients: Any) -> None:
        with sequence.inside():
            run(step, gradients)

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        sequence.add("resize_", size)
        return resize(storage, size)

    def launched(launch: TableLaunch, *operands: Any) -> None:
        sequence.add(launch.kernel, id(launch), operands)

    with mock.patch("torch.backends.cuda.is_built", return_value=True), fake_gpu() as gpu:
        sync = type(gpu).sync

        def synced(gpu: Any, what: str, moment: int | None = None) -> None:
            sequence.add("sync", what)
            sync(gpu, what, moment)

        with (
            mock.patch.object(graph, "EAGER_STEPS", 99),
            mock.patch.object(TableLaunch, "run", launched),
            mock.patch.object(MuonStep, "run", in_sequence),
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(type(gpu), "sync", synced),
            sequence,
        ):
            yield gpu, sequence


Change = Callable[[Any, int], None]


def steps_of(
    options: dict[str, Any], change: Change | None = None, placements: tuple[Placement, ...] | None = ()
) -> Sequence:
    """The buckets of four steps with new gradient tensors, another rate and another momentum in each.

    `placements`: None for plain tensors, as under DDP.
    """
    dtype = options.pop("dtype", torch.float32)
    placed = placements or (Replicate(), Shard(0))
    # The second rank of a node of two.
    node = mock.patch.dict(os.environ, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    with recorded() as (gpu, sequence), fake_rank(4, 1), node:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
        wholes = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
        cut = {name: distribute_tensor(whole, mesh, placed, src_data_rank=None) for name, whole in wholes.items()}
        gpu.has_meta_tensors = False

        def new(name: str) -> Tensor:
            if placements is None:
                return torch.empty(SHAPES[name], dtype=dtype, device="cuda")
            filled, whole = torch.empty(cut[name]._local_tensor.shape, dtype=dtype, device="cuda"), wholes[name]
            return DTensor.from_local(filled, mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride())

        params = {name: nn.Parameter(new(name)) for name in SHAPES}
        muon = Muon(list(params.items()), **muon_keywords(cuda_graph=True, **options)).build()
        kept = []
        for step in range(STEPS):
            for name, param in params.items():
                param.grad = new(name)
                kept.append(param.grad)
            for group in muon.param_groups:
                group["momentum"] = 0.9 + 0.01 * step
                group["lr"] = torch.tensor(0.1, device="cuda") if "lr" in options else 0.1 / (step + 1)
            if change is not None:
                change(muon, step)
            muon.step()
    return sequence


def differing(sequence: Sequence) -> list[str]:
    """What differs between the buckets of the last two steps, and what a graph cannot repeat."""
    before, last = sequence.steps[-2:]
    assert before, "the buckets have operators"
    found = [f"{a[0]} and {b[0]}" for a, b in zip(before, last, strict=False) if a != b]
    found += ["another number of operators"] if len(before) != len(last) else []
    found += [name for name, _ in last if name in ("resize_", "sync")]
    return found + [f"{name} on the host" for name, operands in last if "cpu" in tree_leaves(operands)]


def skippable(muon: Muon, step: int) -> None:
    muon.skip_unless_finite(NormCheck(torch.ones((), device="cuda"), (), torch.zeros(0)))


def scaled(muon: Muon, step: int) -> None:
    muon.grad_scale, muon.found_inf = torch.tensor(8.0, device="cuda"), torch.zeros((), device="cuda")


def with_one_beta(muon: Muon, step: int) -> None:
    """SOAP reads beta1 on the host: another one is another kind of step."""
    for group in muon.param_groups:
        group["momentum"] = 0.9


def with_highest_rate(muon: Muon, step: int) -> None:
    for group in muon.param_groups:
        group["max_lr"] = 0.2


VALUES: dict[str, tuple[Any, ...]] = {
    "algorithm": ("normuon", "adamuon", "muoneq", "muoneq_both", ("muoneq", "normuon"), ("muoneq", "adamuon")),
    "cautious": (True,),
    "dtype": (torch.bfloat16,),
    "exchange": ("all_gather", "all_gather_reduce_scatter"),
    "idle": ("hold",),
    "lr": (torch.tensor(0.1),),
    "nesterov": (False,),
    "ns_dtype": ("bfloat16",),
    "on_bad_gradient": ("skip_step",),
    "orthogonalize": ("reference", "standard", "gram"),
    "planner": ("rule",),
    "replicas": ("redundant",),
    "state": ("owner",),
    "state_dtype": ("bfloat16",),
    "wire_dtype": ("float32",),
}
NUMBERS = {"eps": 1e-7, "ns_steps": 3, "ns_coefficients": ((3.4, -4.8, 2.0),), "adjust_lr_fn": "original"}
ROWS: list[tuple[dict[str, Any], Change | None, tuple[Placement, ...] | None]] = [
    *(({name: value}, None, ()) for name, values in VALUES.items() for value in values),
    *(({}, None, placements) for placements in ((), None, (Shard(0), Shard(0)), (Shard(1), Shard(0)))),
    ({"split": (Split(match="a", dims="(g f) d -> g | f d", lengths={"g": 2}),)}, None, ()),
    ({**NUMBERS, "buffer_gib": 2**-10, "keep_buffers": True, "beta2": 0.9, "algorithm": "normuon"}, None, ()),
    ({"momentum_warmup_steps": 9, "momentum_start": 0.5, "ns_kernel": "plain"}, None, ()),
    ({"exchange": "two_hops", "machine": Machine(ranks_per_node=2)}, None, (Shard(0), Shard(0))),
    *(({"algorithm": name, "weight_decay": 0.0}, None, ()) for name in ("muonh", ("normuon", "muonh"))),
    ({"algorithm": "soap", "soap_freq": 1}, with_one_beta, ()),
    ({"decay_follows_lr": True}, with_highest_rate, ()),
    ({"dtype": torch.bfloat16, "rounding": "nearest"}, None, ()),
    ({}, skippable, ()),
    ({"algorithm": "normuon"}, scaled, ()),
    ({"idle": "hold"}, scaled, ()),
]


def shown(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(("options", "change", "placements"), ROWS, ids=shown)
def test_the_buckets_of_a_step_repeat_those_of_the_step_before(
    options: dict[str, Any], change: Change | None, placements: tuple[Placement, ...] | None
) -> None:
    """No operator, shape, number or memory differs, nothing is read, resized or sent to the device: a graph can."""
    assert differing(steps_of(dict(options), change, placements)) == []


def test_every_option_has_a_row_or_is_refused() -> None:
    tried = {name for options, _, _ in ROWS for name in options} | graph.NOT_CAPTURED.keys()
    # `momentum` changes in each step. Kernels need `fused`, and other packages bring their options.
    assert {*HYPERPARAMETERS, *SHARED} - tried == {"momentum", "fused", "cuda_graph", "algorithm_options"}


BROKEN: dict[str, Callable[[Any], object]] = {
    "a read of the host": lambda kernels: kernels._vector.sum().item(),
    "new memory in each step": lambda kernels: kernels._vector.clone().untyped_storage().resize_(0),
    "a number of the host": lambda kernels: kernels._vector.mul(kernels._rank.params[0].group["lr"]),
    "an address": lambda kernels: kernels._rank.params[0].param.grad._local_tensor.neg(),
    "a copy from the host": lambda kernels: kernels._vector[:1].copy_(
        torch.zeros(1, dtype=torch.int64, device="cpu"), non_blocking=True
    ),
}
"""What a graph cannot repeat, in the place of `Kernels.apply`."""


@pytest.mark.parametrize("name", BROKEN)
def test_the_comparison_finds_what_a_graph_cannot_repeat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "apply", lambda kernels, index: BROKEN[name](kernels))
    assert differing(steps_of({})) != []


# --- refusals on a GPU ---


class Unknown(MuonAlgorithm):
    """Of another package, with a `rescale` that may read anything."""

    def rescale(self, whole: Tensor, states: Any, group: Any, *, transposed: bool) -> None:
        """Nothing."""


class Known(Unknown):
    """Reads nothing."""

    def kind(self, group: Any) -> None:
        """None."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fused": False}, r"needs the kernels of fused, .* \(fused = False\); set False"),
        ({"state_dtype": "int8"}, r"needs the kernels .* 'int8' has a momentum of its own\); set False"),
        ({"algorithm": "unknown"}, r"does not know .* algorithm = 'unknown' reads .*; define kind\(\)"),
        ({"algorithm": "known"}, ""),
        ({}, ""),
    ],
)
def test_what_cannot_be_captured_is_refused(options: dict[str, Any], text: str, monkeypatch: Any) -> None:
    for name, made in (("unknown", Unknown), ("known", Known)):
        monkeypatch.setitem(registry.algorithms._values, name, made)
    with mock.patch("torch.backends.cuda.is_built", return_value=True), fake_gpu():
        param = nn.Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)], **muon_keywords(cuda_graph=True, **options))
        said = message(muon.build)
        assert re.match(f"cuda_graph = True {text}", said) if text else not said
        if not text:
            assert "not measured on a GPU" in muon.plan.reason
            assert muon.options.keep_buffers
            assert "cuda_graph = True does not take offload = 'state'" in message(muon.offload)
            muon.close()


def test_a_preview_says_that_buffers_stay_and_that_no_gpu_has_run_it() -> None:
    captured = Expert(cuda_graph=True)
    text = str(preview(lambda: nn.Linear(64, 64), optimizer=lambda model: Hybrid(model, expert=captured)))
    assert "not measured on a GPU" in text
    assert re.search(r"of these, [\d.]+ MiB of buffers and matrices stay between steps", text)


def test_graphs_are_captured_apart_from_other_threads_and_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, capture = [mock.Mock(), mock.Mock()], mock.MagicMock()
    with mock.patch("torch.backends.cuda.is_built", return_value=True), fake_gpu():
        monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock(side_effect=graphs))
        monkeypatch.setattr(torch.cuda, "graph", capture)
        param = nn.Parameter(torch.empty(16, 16, device="cuda"))
        muon = Muon([("w", param)], expert=Expert(cuda_graph=True))
        for step in range(10):
            param.grad = torch.empty(16, 16, device="cuda")
            if step % 2:
                skippable(muon, step)
            muon.step()
        muon.close()
    mode = {"capture_error_mode": "thread_local"}
    pools = (graphs[0], None), (graphs[1], graphs[0].pool.return_value)
    assert capture.call_args_list == [mock.call(made, pool=pool, **mode) for made, pool in pools]
    assert [(made.replay.call_count, made.reset.call_count) for made in graphs] == [(2, 1)] * 2


def test_gloo_on_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SimpleNamespace(device=torch.device("cuda"), plan=SimpleNamespace(buckets=("exchanged",)))
    parts: Any = SimpleNamespace(rank=rank)
    monkeypatch.setattr(graph, "backends", lambda: {"cuda": "gloo"})
    with pytest.raises(OptionError, match="needs NCCL, because gloo exchanges on the host; set False"):
        graph.GraphFeature().runner(parts)
