"""muon.expert.cuda_graph: a recorded step, replayed on other gradients and rates, has the bits of eager steps.

The record stands for a CUDA graph: it has the operators, launches and collectives of a step with their tensors, and a
replay runs them again. Kernels run under Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.dist.harness import run_ranks
from tests.unit.features.test_fused import Change, Where, first_difference, needs_interpreter, trained
from titan_muon import Expert, Muon
from titan_muon.engine.exchange.exchange import Collectives, Traffic, wait_all
from titan_muon.kernels import batches, fused, graph
from titan_muon.kernels.batches import TableLaunch

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES, STEPS = ("wide", "same", "tall", "experts"), 8
Params = dict[str, nn.Parameter]


class RecordedGraph(TorchDispatchMode):
    """In the place of a CUDA graph. The record has run once, and so does nothing at its first replay."""

    made: list["RecordedGraph"]

    def __init__(self, run: Callable[[], None], other: Any) -> None:
        super().__init__()
        self._calls, self.replays, self.is_reset = list[Callable[[], None]](), 0, False
        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
                patch.setattr(Collectives, name, self._collective(getattr(Collectives, name)))
            patch.setattr(TableLaunch, "run", self._launch(TableLaunch.run))
            run()
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)

        def again() -> None:
            # Results keep their addresses, as in the memory of a graph.
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

        if "empty" not in str(func):
            self._calls.append(again)
        return out

    def _launch(self, run: Callable[..., None]) -> Callable[..., None]:
        def recorded(*operands: Any) -> None:
            self._calls.append(lambda: run(*operands))
            with _disable_current_modes():
                run(*operands)

        return recorded

    def _collective(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(collectives: Collectives, *operands: Any) -> Any:
            def again() -> None:
                # A graph does not count.
                counted, collectives.traffic = collectives.traffic, Traffic()
                wait_all(start(collectives, *operands))
                collectives.traffic = counted

            self._calls.append(again)
            with _disable_current_modes():
                return start(collectives, *operands)

        return recorded

    def replay(self) -> None:
        assert not self.is_reset
        for call in self._calls if self.replays else ():
            call()
        self.replays += 1

    def reset(self) -> None:
        self.is_reset = True


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def patched(patch: pytest.MonkeyPatch) -> None:
    """Captured steps on the CPU."""
    patch.setattr(RecordedGraph, "made", [], raising=False)
    patch.setattr(graph, "captured", RecordedGraph)
    patch.setattr(graph, "captures", lambda kind: True)
    # The interpreter takes a millisecond for a program.
    patch.setattr(batches, "PARTS", 4)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch)


def difference(
    options: dict[str, Any], change: Change | None = None, where: Where = None, steps: int = STEPS
) -> int | None:
    """The first step after which captured steps, with another rate and another momentum in each, differ from eager."""

    def changed(muon: Any, params: Params, step: int) -> None:
        for group in muon.param_groups:
            group["lr"] = 0.02 / (step + 1)
            group["momentum"] = 0.95 if options.get("algorithm") == "soap" else 0.9 + 0.01 * (step % 4)
        if change is not None:
            change(muon, params, step)

    keywords = {"change": changed, "where": where, "steps": steps, "fused": True, **options}
    return first_difference(*(trained(NAMES, **keywords, cuda_graph=captured) for captured in (False, True)))


def replays() -> list[int]:
    return [recorded.replays for recorded in RecordedGraph.made]


REPLAYED = [STEPS - graph.EAGER_STEPS]
BFLOAT16 = {"dtypes": [(torch.bfloat16, torch.bfloat16)] * len(NAMES)}
ROWS: list[dict[str, Any]] = [
    *({"algorithm": name} for name in ("muon", "normuon", "adamuon", "muoneq", ("muoneq", "normuon"))),
    *({"algorithm": name, "weight_decay": 0.0} for name in ("muonh", ("normuon", "muonh"))),
    {"momentum_warmup_steps": 6, "cautious": True},
    BFLOAT16,
]


def of_ranks(rank: int, world_size: int) -> list[object]:
    """The first difference of each row, with the replays of its graph."""
    shape, names = ((2, 2), ("outer", "inner")) if world_size == 4 else ((world_size,), ("inner",))
    placements = [Replicate(), Shard(0)][-len(shape) :]
    where = None if world_size == 1 else (init_device_mesh("cpu", shape, mesh_dim_names=names), placements)
    found = list[object]()
    with pytest.MonkeyPatch.context() as patch:
        for options in ROWS:
            patched(patch)
            found.append((difference(options, where=where), replays()))
    return found


@needs_interpreter
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replays_have_the_bits_of_eager_steps(ranks: int) -> None:
    assert run_ranks(of_ranks, ranks) == [[(None, REPLAYED)] * len(ROWS)] * ranks


@needs_interpreter
def test_soap_has_a_graph_for_each_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "EAGER_STEPS", 1)
    assert difference({"algorithm": "soap", "soap_freq": 2}) is None
    assert replays() == [3, 2], "after the first step, those in which a matrix gets new bases or another does"


@needs_interpreter
def test_a_replay_without_a_refresh_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of these tests: the vector of a step stays as it was at the capture."""
    begin = fused.Kernels.begin
    refresh = lambda kernels, gradients: None if RecordedGraph.made else begin(kernels, gradients)  # noqa: E731
    monkeypatch.setattr(fused.Kernels, "begin", refresh)
    assert difference({}) == graph.EAGER_STEPS + 1


# --- steps with a fault, and what releases a graph ---


def faulty(muon: Any, params: Params, step: int) -> None:
    """A parameter left out, a skipped step, and a gradient of another dtype."""
    if step == 4:
        params["tall"].grad = None
    if step == 5:
        muon.found_inf = torch.ones(())
    elif hasattr(muon, "found_inf"):
        del muon.found_inf
    if step == 6:
        params["wide"].grad_dtype = None
        params["wide"].grad = params["wide"].grad.bfloat16()


def unaligned(muon: Any, params: Params, step: int) -> None:
    if step == 5:
        params["same"].grad = torch.ones(params["same"].numel() + 1)[1:].view_as(params["same"])


@needs_interpreter
@pytest.mark.parametrize(
    ("options", "change", "replayed"),
    # An unaligned gradient is copied. A left out parameter and another dtype are eager: steps 3 and 7 replay.
    [({}, unaligned, REPLAYED), ({"on_bad_gradient": "skip_missing"}, faulty, [2])],
)
def test_a_step_with_a_fault_has_the_bits_of_an_eager_step(options: Any, change: Change, replayed: list[int]) -> None:
    assert difference(options, change) is None
    assert replays() == replayed


def of_a_fault(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    def missing(muon: Any, params: Params, step: int) -> None:
        if rank == 0 and step == graph.EAGER_STEPS + 1:
            params["tall"].grad = None

    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        # The step after it raises.
        where = init_device_mesh("cpu", (2,)), [Shard(0)]
        return difference({}, missing, where, graph.EAGER_STEPS + 2), replays()


@needs_interpreter
def test_all_ranks_replay_a_step_in_which_one_lacks_a_gradient() -> None:
    """NCCL wants a collective to be captured on all of its ranks or on none."""
    assert run_ranks(of_a_fault, 2) == [(None, [2])] * 2


RELEASES: dict[str, Callable[[Muon], object]] = {
    "rebuild": lambda muon: muon.rebuild(),
    "load_state_dict": lambda muon: muon.load_state_dict(muon.state_dict()),
    "close": lambda muon: muon.close(),
}


@needs_interpreter
@pytest.mark.parametrize("name", RELEASES)
def test_graphs_end_before_buffers_and_process_groups(name: str) -> None:
    param = nn.Parameter(torch.ones(16, 24))
    muon = Muon([("w", param)], expert=Expert(fused=True, cuda_graph=True))

    def stepped() -> None:
        param.grad = torch.randn(16, 24)
        muon.step()

    for _ in range(graph.EAGER_STEPS + 1):
        stepped()
    (recorded,) = RecordedGraph.made
    assert not recorded.is_reset
    RELEASES[name](muon)
    assert recorded.is_reset
    if name != "close":
        stepped()
        assert recorded.replays == 1
