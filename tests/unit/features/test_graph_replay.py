"""muon.expert.cuda_graph: a recorded step, replayed on other gradients and rates, has the bits of eager steps.

The record stands for a CUDA graph: it has the operators, launches and collectives of a step with their tensors, and a
replay runs them again. Kernels run under Triton's interpreter.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.dist.harness import run_ranks
from tests.shared import equal, local, muon_keywords
from tests.unit.features.test_fused import needs_interpreter
from titan_muon import Expert, Hybrid, Muon
from titan_muon.engine.exchange.exchange import Collectives, Traffic, wait_all
from titan_muon.kernels import batches, fused, graph
from titan_muon.kernels.launch import TableLaunch

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = {"a": (24, 40), "b": (24, 40), "tall": (33, 20), "experts": (3, 16, 32)}
STEPS = 8


class RecordedGraph(TorchDispatchMode):
    """In the place of `CudaGraph`. The record has run once, and so does nothing at its first replay."""

    made: list["RecordedGraph"]

    def __init__(self, run: Callable[[], None], other: Any) -> None:
        super().__init__()
        self._calls, self.replays, self.is_released = list[Callable[[], None]](), 0, False
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
        assert not self.is_released
        for call in self._calls if self.replays else ():
            call()
        self.replays += 1

    def release(self) -> None:
        self.is_released = True


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def patched(patch: pytest.MonkeyPatch) -> None:
    """Captured steps on the CPU."""
    patch.setattr(RecordedGraph, "made", [], raising=False)
    patch.setattr(graph, "CudaGraph", RecordedGraph)
    patch.setattr(graph, "captures", lambda kind: True)
    # The interpreter takes a millisecond for a program.
    patch.setattr(batches, "PARTS", 4)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch)


Change = Callable[[Any, dict[str, nn.Parameter], int], None]
"""Before a step: of the optimizer, of its parameters, in a step."""


def made(options: dict[str, Any], captured: bool, mesh: Any = None) -> tuple[dict[str, nn.Parameter], Muon]:
    generator = torch.Generator().manual_seed(0)
    options, dtype = dict(options), options.get("dtype", torch.float32)
    options.pop("dtype", None)
    params = {
        name: nn.Parameter(placed(torch.randn(s, generator=generator).to(dtype), mesh)) for name, s in SHAPES.items()
    }
    keywords = {"lr": 0.02, "fused": True, "cuda_graph": captured, **options}
    return params, Muon(list(params.items()), **muon_keywords(**keywords))


def placed(tensor: Tensor, mesh: Any) -> Tensor:
    return tensor if mesh is None else distribute_tensor(tensor, mesh, [Replicate(), Shard(0)][-mesh.ndim :])


def trained(
    options: dict[str, Any], captured: bool, mesh: Any = None, change: Change | None = None
) -> list[list[Tensor]]:
    """Traffic, weights and states after each step. The gradients of all steps are kept, so that no address returns."""
    params, muon = made(options, captured, mesh)
    kept, results = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step + 1)
        for param in params.values():
            param.grad = placed(torch.randn(param.shape, generator=generator).to(param.dtype), mesh)
            kept.append(param.grad)
        for group in muon.param_groups:
            group["lr"] = 0.02 / (step + 1)
            group["momentum"] = 0.95 if options.get("algorithm") == "soap" else 0.9 + 0.01 * (step % 4)
        if change is not None:
            change(muon, params, step)
        muon.step()
        traffic = torch.tensor([muon.exchange.traffic.calls, muon.exchange.traffic.bytes_sent])
        results.append([traffic, *(t.clone() for p in params.values() for t in (local(p), *_states(muon, p)))])
    return results


def _states(muon: Muon, param: Tensor) -> list[Tensor]:
    return [local(state) for state in muon.state[param].values() if isinstance(state, Tensor)]


def first_difference(options: dict[str, Any], mesh: Any = None, change: Change | None = None) -> int | None:
    """The first step after which captured steps differ from eager steps."""
    eager, captured = (trained(options, on, mesh, change) for on in (False, True))
    return next((step for step, pair in enumerate(zip(eager, captured, strict=True)) if not equal(*pair)), None)


def replays() -> list[int]:
    return [recorded.replays for recorded in RecordedGraph.made]


ROWS: list[dict[str, Any]] = [
    *({"algorithm": name} for name in ("muon", "normuon", "adamuon", "muoneq", ("muoneq", "normuon"))),
    *({"algorithm": name, "weight_decay": 0.0} for name in ("muonh", ("normuon", "muonh"))),
    {"momentum_warmup_steps": 6, "cautious": True},
    {"dtype": torch.bfloat16},
]


@needs_interpreter
@pytest.mark.parametrize("options", ROWS, ids=str)
def test_replays_have_the_bits_of_eager_steps(options: dict[str, Any]) -> None:
    assert first_difference(options) is None
    assert replays() == [STEPS - graph.EAGER_STEPS]


@needs_interpreter
def test_soap_has_a_graph_for_each_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "EAGER_STEPS", 1)
    assert first_difference({"algorithm": "soap", "soap_freq": 2}) is None
    assert replays() == [3, 2], "after the first step, those in which a matrix gets new bases or another does"


# --- controls ---


@needs_interpreter
def test_a_replay_without_a_refresh_has_other_bits() -> None:
    """The control of the tests above."""
    eager = trained({}, captured=False)
    for part in ("addresses", "numbers", "vector"):
        RecordedGraph.made.clear()
        with pytest.MonkeyPatch.context() as patch:
            stale(part, patch)
            captured = trained({}, captured=True)
        same = [equal(*pair) for pair in zip(eager, captured, strict=True)]
        assert same == [step <= graph.EAGER_STEPS for step in range(STEPS)], part


def stale(part: str, patch: pytest.MonkeyPatch) -> None:
    """A part of the vector stays as it was when the first gradients were new, from the first replay on."""
    begin, numbers_of = fused.Kernels.begin, fused.Kernels._numbers_of
    first: dict[Any, Any] = {}

    def stale_begin(kernels: Any, gradients: Any) -> None:
        if not RecordedGraph.made:
            first["gradients"] = gradients
        if part != "vector" or not RecordedGraph.made:
            begin(kernels, first["gradients"] if part == "addresses" else gradients)

    def stale_numbers(kernels: Any, gathering: Any, returning: Any, call: Any) -> Any:
        if not RecordedGraph.made:
            first[call.out_in] = numbers_of(kernels, gathering, returning, call)
        return first[call.out_in]

    patch.setattr(fused.Kernels, "begin", stale_begin)
    if part == "numbers":
        patch.setattr(fused.Kernels, "_numbers_of", stale_numbers)


# --- ranks ---


def of_ranks(rank: int, world_size: int) -> list[object]:
    """The first difference of each row, and whether Hybrids are equal; each with the replays of its graphs."""
    shape, names = ((2,), ("inner",)) if world_size == 2 else ((2, 2), ("outer", "inner"))
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=names), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        for options in ROWS:
            patched(patch)
            found.append((first_difference(options, mesh), replays()))
        patched(patch)
        found.append((equal_hybrids(mesh), replays()))
    return found


@needs_interpreter
@pytest.mark.parametrize("ranks", [2, 4])
def test_replays_of_ranks_have_the_bits_of_eager_steps(ranks: int) -> None:
    replayed = [STEPS - graph.EAGER_STEPS]
    assert run_ranks(of_ranks, ranks) == [[(None, replayed)] * len(ROWS) + [(True, replayed)]] * ranks


# --- steps with a fault, and what releases a graph ---


def faulty(muon: Any, params: dict[str, nn.Parameter], step: int) -> None:
    """A parameter left out, a skipped step, and a gradient of another dtype."""
    if step == 4:
        params["tall"].grad = None
    if step == 5:
        muon.found_inf = torch.ones(())
    elif hasattr(muon, "found_inf"):
        del muon.found_inf
    if step == 6:
        params["a"].grad_dtype = None
        params["a"].grad = params["a"].grad.bfloat16()


def unaligned(muon: Any, params: dict[str, nn.Parameter], step: int) -> None:
    if step == 5:
        params["b"].grad = torch.ones(params["b"].numel() + 1)[1:].view_as(params["b"])


@needs_interpreter
def test_an_unaligned_gradient_is_copied_and_the_step_replays() -> None:
    assert first_difference({}, change=unaligned) is None
    assert replays() == [STEPS - graph.EAGER_STEPS]


def of_a_fault(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    def missing(muon: Any, params: dict[str, nn.Parameter], step: int) -> None:
        if rank == 0 and step == graph.EAGER_STEPS + 1:
            params["tall"].grad = None

    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        # The step after it raises.
        patch.setattr(sys.modules[__name__], "STEPS", graph.EAGER_STEPS + 2)
        return first_difference({}, init_device_mesh("cpu", (2,)), missing), replays()


@needs_interpreter
def test_all_ranks_replay_a_step_in_which_one_lacks_a_gradient() -> None:
    """NCCL wants a collective to be captured on all of its ranks or on none."""
    assert run_ranks(of_a_fault, 2) == [(None, [2])] * 2


@needs_interpreter
def test_a_step_that_leaves_out_a_parameter_or_has_another_dtype_is_eager_and_the_next_step_replays() -> None:
    assert first_difference({"on_bad_gradient": "skip_missing"}, change=faulty) is None
    assert replays() == [2], "steps 3 and 7"


RELEASES: dict[str, Callable[[Muon], object]] = {
    "rebuild": lambda muon: muon.rebuild(),
    "load_state_dict": lambda muon: muon.load_state_dict(muon.state_dict()),
    "close": lambda muon: muon.close(),
}


@needs_interpreter
@pytest.mark.parametrize("name", RELEASES)
def test_graphs_end_before_buffers_and_process_groups(name: str) -> None:
    params, muon = made({}, captured=True)

    def stepped() -> None:
        for param in params.values():
            param.grad = torch.randn(param.shape)
        muon.step()

    for _ in range(graph.EAGER_STEPS + 1):
        stepped()
    (recorded,) = RecordedGraph.made
    assert not recorded.is_released
    RELEASES[name](muon)
    assert recorded.is_released
    if name != "close":
        stepped()
        assert recorded.replays == 1


# --- Hybrid ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.norm = nn.Embedding(7, 24), nn.Linear(24, 40), nn.LayerNorm(40)


def of_hybrid(captured: bool, mesh: Any) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = Model()
    for module in model.children():
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(placed(param.detach(), mesh)))
    hybrid = Hybrid(model, lr=0.02, expert=Expert(fused=True, cuda_graph=captured))
    kept, results = [], []
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = placed(torch.randn(param.shape, generator=torch.Generator().manual_seed(step)), mesh)
            kept.append(param.grad)
        for group in hybrid.param_groups:
            group["lr"] = 0.02 / (step + 1)
        hybrid.step()
        results.append([local(param).clone() for param in model.parameters()])
    hybrid.free()
    return results


def equal_hybrids(mesh: Any = None) -> bool:
    eager, captured = (of_hybrid(on, mesh) for on in (False, True))
    return all(equal(*pair) for pair in zip(eager, captured, strict=True))


@needs_interpreter
def test_a_hybrid_replays_muon_and_steps_adamw_beside_it() -> None:
    assert equal_hybrids()
    assert replays() == [STEPS - graph.EAGER_STEPS]
    assert RecordedGraph.made[0].is_released
