"""Updates in the next forward: the same numbers as updates in the step, applied before each layer's gather."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

from benchmarks.owned_model import summed_plainly
from tests.dist.harness import on_ranks
from tests.parity.table import SLOW
from tests.shared import equal, local, message, muon_keywords
from titan_muon import Muon, apply_in_forward
from titan_muon.plugins.forward_hooks import forward_updates

FORWARD: dict[str, Any] = {"overlap": "forward", "orthogonalize": "reference", "machine": SLOW, "lr": 0.05}
STEPS = 3
DIM, LAYERS = 16, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = recomputed(layer, x, use_reentrant=False)
        return x


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 shards a model. The first `layers` layers are modules, and with `separate` the linear layers too."""

    layers: int = LAYERS
    separate: bool = False
    reshards: bool = True
    prefetches: bool = False
    compiled: bool = False


CASES: dict[str, Sharding] = {
    "shards": Sharding(),
    "prefetched": Sharding(prefetches=True),
    "kept after forward": Sharding(reshards=False),
    "one module": Sharding(layers=0),
    "compiled": Sharding(compiled=True),
    "linear layers, prefetched": Sharding(separate=True, prefetches=True),
}
"""Rows of tests/parity have meshes and options."""


class Run:
    """A model over all ranks and the Muon of the matrices; the learning rate halves after each step."""

    def __init__(self, sharding: Sharding, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self._shard(sharding)
        self.named = list(self.net.named_parameters())
        self.muon = Muon(self.named, **muon_keywords(**(FORWARD | options)))
        if forward_updates(self.muon) is not None:
            apply_in_forward(self.net, self.muon)
        self.left: list[int] = []
        for layer in self.net.layers:
            layer.register_forward_pre_hook(self.note)

    def _shard(self, sharding: Sharding) -> None:
        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for number, layer in enumerate(self.net.layers):
            if sharding.compiled:
                layer.compile(backend="eager", fullgraph=True)
            for linear in layer.children() if sharding.separate else ():
                fully_shard(linear, **options)
            if number < sharding.layers:
                fully_shard(layer, **options, reshard_after_forward=sharding.reshards)
        fully_shard(self.net, **options)
        for before, following in pairwise(self.sharded()[1:]) if sharding.prefetches else ():
            before.set_modules_to_forward_prefetch([following])
        summed_plainly(self.net)

    def sharded(self) -> list[FSDPModule]:
        """The modules of FSDP2, the root first."""
        return [module for module in self.net.modules() if isinstance(module, FSDPModule)]

    def weights(self) -> list[Tensor]:
        return [local(param).clone() for _, param in self.named]

    def note(self, *_: Any) -> None:
        """How many updates are left when a layer computes."""
        if not torch.compiler.is_compiling():
            self.left.append(updates_left(self.muon))

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return self.net(torch.randn(4, DIM, generator=generator)).square().mean()

    def step(self, step: int) -> None:
        for _ in range(2):
            self.loss(step).backward()
        self.muon.step()
        for group in self.muon.param_groups:
            group["lr"] /= 2
        self.muon.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Weights and momenta here, all steps done."""
        self.muon.finish_step()
        return [*self.weights(), *(local(self.muon.state[param]["momentum_buffer"]) for _, param in self.named)]


def updates_left(muon: Muon) -> int:
    """How many updates the last step has left to a forward."""
    late = forward_updates(muon)
    return 0 if late is None else len(late._suspended)


@on_ranks(2)
def test_every_layer_applies_only_its_updates_in_forward_with_the_bits_of_a_step_without_overlap(rank: int) -> None:
    for name, sharding in CASES.items():
        ours, theirs = (Run(sharding, overlap=overlap) for overlap in ("forward", "none"))
        for step in range(STEPS):
            ours.step(step)
            theirs.step(step)
        pending = updates_left(ours.muon)
        assert pending > 0, name
        if name == "shards":
            # Each of a step's two passes comes to a layer in forward, and again in backward.
            first, others = ours.left[-4 * LAYERS : -3 * LAYERS], ours.left[-3 * LAYERS :]
            assert pending > first[0] > first[-1] == 0, "the first layer's are applied, and others wait"
            assert first == sorted(first, reverse=True)
            assert not any(others)
        assert name != "one module" or ours.left[-4 * LAYERS] == 0
        sent = ours.muon.exchange.traffic.bytes_sent, theirs.muon.exchange.traffic.bytes_sent
        assert sent[0] == sent[1], f"{name}: what is left is no more bytes"
        assert equal(ours.tensors(), theirs.tensors()), name
        assert updates_left(ours.muon) == 0, name
        assert not any(buffer.untyped_storage().nbytes() for buffer in ours.muon.engine.rank.buffers.tensors), "freed"


# --- who else reads or writes weights ---


def copies(values: Mapping[str, Any]) -> list[Tensor]:
    """This rank's parts of the weights in a state dict."""
    return [local(value).clone() for value in values.values()]


def evaluate(run: Run) -> list[Tensor]:
    with torch.no_grad():
        return [run.loss(7)]


def load(run: Run) -> list[Tensor]:
    weights = {name: torch.full_like(value, 0.25) for name, value in run.net.state_dict().items()}
    run.step(6)
    run.net.load_state_dict(weights)
    return run.weights()


def step_again(run: Run) -> list[Tensor]:
    """A step on gradients without a forward before."""
    for index, (_, param) in enumerate(run.named):
        param.grad = torch.full_like(param, 0.1 + index).detach()
    run.muon.step()
    return []


BETWEEN: dict[str, Callable[[Run], list[Tensor]]] = {
    "evaluate": evaluate,
    "infer": torch.inference_mode()(lambda run: [run.loss(7).clone()]),
    "state dict of a layer": lambda run: copies(run.net.layers[LAYERS - 1].state_dict()),
    "checkpoint": lambda run: copies(get_model_state_dict(run.net)),
    "state dict of the optimizer": lambda run: bool(run.muon.state_dict()) and run.weights(),
    "check_last_step": lambda run: run.muon.check_last_step() or run.weights(),
    "finish_step": lambda run: run.muon.finish_step() or run.weights(),
    "load": load,
    "step_again": step_again,
    "close": lambda run: run.muon.close() or run.weights(),
}
"""Reads and writes of weights between two steps. After `close` no step follows."""


@on_ranks(2)
def test_reads_and_writes_of_weights_apply_pending_updates_first(rank: int) -> None:
    for name, act in BETWEEN.items():
        ours, theirs = (Run(Sharding(), overlap=overlap) for overlap in ("forward", "none"))
        for step in range(2):
            ours.step(step)
            theirs.step(step)
        assert updates_left(ours.muon) > 0
        assert equal(act(ours), act(theirs)), name
        if name != "close":
            ours.step(3)
            theirs.step(3)
            assert equal(ours.tensors(), theirs.tensors()), name


# --- faults and refusals ---


def call_another_method(run: Run) -> None:
    """The root's method, without a hook."""
    run.net.other = partial(Net.forward, run.net)  # type: ignore[assignment]
    register_fsdp_forward_method(run.net, "other")
    run.net.other(torch.zeros(4, DIM))  # type: ignore[operator]


GATHERED, REPLACED = "was all-gathered before the update was applied", "storage was replaced before the update"
MISUSE: tuple[tuple[Callable[[Run], object], Sharding, str], ...] = (
    (lambda run: (run.sharded()[-1].unshard(), run.loss(5)), Sharding(), f"layers.3: {GATHERED}"),
    (call_another_method, Sharding(layers=2), f"the root module: {GATHERED}"),
    (lambda run: (run.net._apply(torch.clone), run.loss(5)), Sharding(), REPLACED),
    (lambda run: (run.net._apply(torch.clone), step_again(run)), Sharding(), REPLACED),
    (lambda run: (run.muon.finish_step(), run.net._apply(torch.clone), run.loss(5)), Sharding(), ""),
)


@on_ranks(2)
def test_misuse_of_weights_with_a_pending_update_is_an_error(rank: int) -> None:
    for act, sharding, expected in MISUSE:
        run = Run(sharding)
        run.step(0)
        assert updates_left(run.muon) > 0
        text = message(lambda act=act, run=run: act(run))
        assert expected in text
        assert bool(text) == bool(expected), text
        assert not text or "finish_step()" in text


@on_ranks(2)
def test_a_model_holds_no_reference_to_a_closed_muon_and_a_waiting_bucket_none_to_gradients(rank: int) -> None:
    run = Run(Sharding())
    run.step(0)
    grads = [weakref.ref(p.grad.to_local()) for p in run.net.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    run.net.zero_grad()
    gc.collect()
    assert sum(grad() is not None for grad in grads) == 0
    run.muon.close()
    closed = [weakref.ref(run.muon), *(weakref.ref(s["momentum_buffer"]) for s in run.muon.state.values())]
    del run.muon
    gc.collect()
    assert sum(left() is not None for left in closed) == 0


def bare() -> nn.Sequential:
    """Matrices outside of FSDP2's modules."""
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8, bias=False)) for name in ("inner", "outer")))


@on_ranks(2)
def test_unfit_results_are_refused_before_the_first_pending_update(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    outside, half, run = bare(), bare(), Run(Sharding())
    parallelize_module(outside, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    forward = Muon(outside.named_parameters(), overlap="forward")
    fully_shard(half.inner, mesh=mesh)
    fully_shard(half.outer, mesh=mesh)
    unattached = Muon(half.named_parameters(), overlap="forward")
    for param in half.parameters():
        param.grad = torch.ones_like(param)
    text = message(lambda: apply_in_forward(outside, forward))
    assert "inner.weight, outer.weight are in no module of fully_shard" in text
    text = message(lambda: apply_in_forward(run.net, Muon(run.net.named_parameters())))
    assert "build Muon with overlap = 'forward'" in text
    text = message(unattached.step)
    assert "call titan_muon.apply_in_forward(model, optimizer) once, before the first step" in text
    text = message(lambda: apply_in_forward(half.inner, unattached))
    assert "outer.weight are in no module" in text
    assert "inner.weight" not in text
    text = message(lambda: apply_in_forward(run.net, run.muon))
    assert text == "apply_in_forward: was called for this Muon before; call it only once"
