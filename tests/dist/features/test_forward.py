"""Updates in the next forward: the same numbers as updates in the step, applied before each layer's gather."""

import gc
import io
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

from tests.dist.features.test_overlap import SLOW, raised
from tests.dist.harness import run_ranks
from titan_muon import Muon, apply_in_forward, muon
from titan_muon.fsdp.forward_hooks import forward_updates

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
    """Shards of a model on a mesh of shards, of replicas and shards, or of replicas, shards and tensor parallelism.

    The first `layers` layers are modules of FSDP2. With `separate` the linear layers are modules too, and with `mixed`
    the first linear layer of each is replicated.
    """

    mesh: tuple[int, ...] = (2,)
    layers: int = LAYERS
    separate: bool = False
    reshards: bool = True
    prefetches: bool = False
    mixed: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def axes(self) -> tuple[str, ...]:
        return ("shard",) if len(self.mesh) == 1 else ("replicate", "shard", "tp")[: len(self.mesh)]


CASES: dict[str, Sharding] = {
    "shards": Sharding(),
    "prefetched": Sharding(prefetches=True),
    "kept after forward": Sharding(reshards=False),
    "by themselves": Sharding(separate=True),
    "one module": Sharding(layers=0),
    "compiled": Sharding(compiled=True),
    "bfloat16": Sharding(dtype=torch.bfloat16),
    "copies": Sharding((2, 1), prefetches=True),
    "tensor parallelism alone": Sharding((1, 1, 2)),
    "shards and copies": Sharding(separate=True, mixed=True),
    "shards and copies, prefetched": Sharding(separate=True, mixed=True, prefetches=True),
}
"""How a model is sharded; rows of tests/parity have the options."""


class Run:
    """A model on a mesh and the Muon of the matrices; the learning rate halves after each step."""

    def __init__(self, sharding: Sharding, **options: Any) -> None:
        self.sharding = sharding
        self.mesh = init_device_mesh("cpu", sharding.mesh, mesh_dim_names=sharding.axes)
        torch.manual_seed(0)
        self.net = Net().to(sharding.dtype)
        self._shard(self.mesh[tuple(axis for axis in sharding.axes if axis != "tp")])
        self.named = [(name, param) for name, param in self.net.named_parameters() if isinstance(param, DTensor)]
        self.muon = Muon(self.named, **(FORWARD | options))
        if forward_updates(self.muon) is not None:
            apply_in_forward(self.net, self.muon)
        self.left: list[int] = []
        for layer in self.net.layers:
            layer.register_forward_pre_hook(self.note)

    def _shard(self, data: DeviceMesh) -> None:
        sharding, policy = self.sharding, MixedPrecisionPolicy(reduce_dtype=torch.float32)
        copies = init_device_mesh("cpu", (self.mesh.size(), 1), mesh_dim_names=("replicate", "shard"))
        for number, layer in enumerate(self.net.layers):
            if "tp" in sharding.axes:
                parallelize_module(layer, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if sharding.compiled:
                layer.compile(backend="eager", fullgraph=True)
            for place, linear in enumerate(layer.children() if sharding.separate else ()):
                fully_shard(linear, mesh=copies if sharding.mixed and place == 0 else data, mp_policy=policy)
            if number < sharding.layers:
                fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=sharding.reshards)
        fully_shard(self.net, mesh=data, mp_policy=policy)
        for before, following in pairwise(self.sharded()[1:]) if sharding.prefetches else ():
            before.set_modules_to_forward_prefetch([following])
        for module in self.sharded():
            # gloo has no PREMUL_SUM.
            module.set_force_sum_reduction_for_comms(True)

    def sharded(self) -> list[FSDPModule]:
        """The modules of FSDP2, the root first."""
        return [module for module in self.net.modules() if isinstance(module, FSDPModule)]

    def weights(self) -> list[Tensor]:
        """Copies of the local weights."""
        return [param.to_local().detach().clone() for _, param in self.named]

    def note(self, *_: Any) -> None:
        """How many updates are left when a layer computes."""
        if torch.compiler.is_compiling():
            return
        self.left.append(updates_left(self.muon))

    def loss(self, step: int) -> Tensor:
        places = list(self.mesh.get_coordinate() or ())
        data = places[: 2 if len(places) > 1 else 1]
        generator = torch.Generator().manual_seed(100 * step + sum(3**i * place for i, place in enumerate(data)))
        output: Tensor = self.net(torch.randn(4, DIM, generator=generator).to(self.sharding.dtype))
        return output.float().square().mean()

    def step(self, step: int, microbatches: int = 2) -> None:
        for _ in range(microbatches):
            self.loss(step).backward()
        self.muon.step()
        for group in self.muon.param_groups:
            group["lr"] /= 2
        self.muon.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Weights and momenta here, all steps done."""
        self.muon.finish_step()
        averages = [self.muon.state[param].get("momentum_buffer") for _, param in self.named]
        return [*self.weights(), *(average.to_local().clone() for average in averages if average is not None)]


def updates_left(muon: Muon) -> int:
    """How many updates the last step has left to a forward."""
    late = forward_updates(muon)
    return 0 if late is None else len(late._suspended)


def same(a: Run, b: Run) -> bool:
    return all(map(torch.equal, a.tensors(), b.tensors()))


def digits(rank: int, world_size: int) -> dict[str, tuple[bool, int, bool, list[int], int, int]]:
    """Whether the bits equal a run without `overlap`, and the number of pending updates after each step."""
    results = {}
    for name, sharding in CASES.items():
        ours, theirs = (Run(sharding, overlap=overlap) for overlap in ("forward", "none"))
        for step in range(STEPS):
            ours.step(step)
            theirs.step(step)
        # Each of a step's two passes comes to a layer in forward, and again in backward.
        left, sent = ours.left[-4 * LAYERS :], ours.muon.exchange.traffic.bytes_sent
        begun = updates_left(ours.muon)
        bytes_sent = sent, theirs.muon.exchange.traffic.bytes_sent
        results[name] = (same(ours, theirs), begun, (updates_left(ours.muon) > 0), left, *bytes_sent)
    return results


@cache
def cases_on_ranks() -> list[dict[str, tuple[bool, int, bool, list[int], int, int]]]:
    return run_ranks(digits, 2)


def test_digits_equal_steps_without_forward_overlap() -> None:
    for cases in cases_on_ranks():
        for name, (equal, begun, after, _, ours, theirs) in cases.items():
            assert begun > 0, name
            assert not after, name
            assert equal, name
            assert ours == theirs, f"{name}: what is left is no more bytes"


def test_every_layer_applies_only_the_updates_of_that_layer_in_forward() -> None:
    for cases in cases_on_ranks():
        _, begun, _, left, _, _ = cases["shards"]
        first, others = left[:LAYERS], left[LAYERS:]
        assert begun > first[0] > first[-1] == 0, "the first layer's are applied, and others wait"
        assert first == sorted(first, reverse=True)
        assert not any(others)
        prefetching = cases["prefetched"][3][:LAYERS]
        assert prefetching[0] <= first[0]
        assert cases["one module"][3][0] == 0


# --- who else reads or writes weights ---


def evaluate(run: Run) -> object:
    with torch.no_grad():
        return run.loss(7)


def infer(run: Run) -> object:
    with torch.inference_mode():
        return run.loss(7).item()


def local(values: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value.to_local().clone() for name, value in values.items() if isinstance(value, DTensor)}


def state_dict(run: Run) -> object:
    return local(run.net.state_dict())


def layer_state_dict(run: Run) -> object:
    return local(run.net.layers[LAYERS - 1].state_dict())


def checkpoint(run: Run) -> object:
    return local(get_model_state_dict(run.net))


def optimizer_state(run: Run) -> object:
    run.muon.state_dict()
    return run.weights()


def check(run: Run) -> object:
    run.muon.check_last_step()
    return run.weights()


def finish(run: Run) -> object:
    run.muon.finish_step()
    return run.weights()


def averaged(run: Run) -> object:
    """The read of an average of weights after finish_step()."""
    run.muon.finish_step()
    averages = [torch.zeros_like(param).lerp_(param.detach(), 0.5) for _, param in run.named]
    return [average.full_tensor() for average in averages]


def load(run: Run) -> object:
    weights = {name: torch.full_like(value, 0.25) for name, value in run.net.state_dict().items()}
    run.step(6)
    return run.net.load_state_dict(weights)


def load_checkpoint(run: Run) -> object:
    weights: dict[str, Any] = {name: torch.full_like(param, 0.25) for name, param in run.named}
    run.step(6)
    return set_model_state_dict(run.net, weights)


def load_optimizer(run: Run) -> object:
    """Load another step with momentum in new tensors."""
    saved = io.BytesIO()
    torch.save(run.muon.state_dict(), saved)
    run.step(6)
    saved.seek(0)
    run.muon.load_state_dict(torch.load(saved, weights_only=False))
    return run.weights()


def step_again(run: Run) -> object:
    """A step on gradients without a forward before."""
    for index, (_, param) in enumerate(run.named):
        param.grad = torch.full_like(param, 0.1 + index).detach()
    return run.muon.step()


def by_closure(run: Run) -> object:
    def closure() -> float:
        run.muon.zero_grad()
        loss = run.loss(8)
        loss.backward()
        return loss.item()

    return run.muon.step(closure)


def close(run: Run) -> object:
    run.muon.close()
    return run.weights()


READ = (evaluate, infer, state_dict, layer_state_dict, checkpoint, optimizer_state, check, finish, averaged)
WRITE = (load, load_checkpoint, load_optimizer, step_again, by_closure)
BETWEEN: dict[str, Callable[[Run], object]] = {act.__name__: act for act in (*READ, *WRITE)}


def equal_values(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return a == b or (a is None) == (b is None)


def after_a_step(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """Whether reads between two steps, and later training, equal a run without `overlap`."""
    results = {}
    for name, act in BETWEEN.items():
        ours, theirs = (Run(Sharding(), overlap=overlap) for overlap in ("forward", "none"))
        for step in range(2):
            ours.step(step)
            theirs.step(step)
        assert updates_left(ours.muon) > 0
        seen = equal_values(act(ours), act(theirs))
        ours.step(3)
        theirs.step(3)
        results[name] = seen, same(ours, theirs)
    ours, theirs = (Run(Sharding(), overlap=overlap) for overlap in ("forward", "none"))
    for run in (ours, theirs):
        run.step(0)
    return results | {"close": (equal_values(close(ours), close(theirs)), True)}


def test_reads_and_writes_of_weights_apply_pending_updates_first() -> None:
    for results in run_ranks(after_a_step, 2):
        assert set(results) == {*BETWEEN, "close"}
        assert results == dict.fromkeys(results, (True, True))


def buffers(run: Run) -> int:
    return sum(buffer.untyped_storage().nbytes() for buffer in run.muon.engine.rank.buffers.tensors)


def memory(rank: int, world_size: int) -> tuple[int, list[int], int]:
    """Bytes of buffers behind a step, when each layer computes, and behind the forward."""
    run, seen = Run(Sharding()), list[int]()
    run.step(0)
    behind = buffers(run)
    for layer in run.net.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(buffers(run)))
    evaluate(run)
    return behind, seen, buffers(run)


def test_buffers_live_until_the_last_layer_is_updated() -> None:
    for behind, seen, after in run_ranks(memory, 2):
        assert behind > 0
        assert seen[0] == behind, "the first layer"
        assert seen[-1] == after == 0, "the last one"


# --- faults and refusals ---


def unsharded_early(run: Run) -> None:
    run.sharded()[-1].unshard()
    run.loss(5)


def by_another_method(run: Run) -> None:
    """The root's method, without a hook."""
    register_fsdp_forward_method(run.net, "other")
    run.net.other(torch.zeros(4, DIM))  # type: ignore[operator]


def by_another_method_in_order(run: Run) -> None:
    run.muon.finish_step()
    by_another_method(run)


def replaced(run: Run) -> None:
    run.net._apply(torch.clone)
    run.loss(5)


def replaced_and_stepped(run: Run) -> None:
    run.net._apply(torch.clone)
    step_again(run)


def replaced_after_finish(run: Run) -> None:
    run.muon.finish_step()
    replaced(run)


def in_order(run: Run) -> None:
    run.muon.finish_step()
    unsharded_early(run)


GATHERED, REPLACED = "was all-gathered before the update was applied", "storage was replaced before the update"
MISUSE: dict[str, tuple[Callable[[Run], None], Sharding, str]] = {
    "unsharded": (unsharded_early, Sharding(), f"layers.3: {GATHERED}"),
    "method": (
        by_another_method,
        Sharding(layers=2),
        f"the root module: {GATHERED}",
    ),
    "method in order": (by_another_method_in_order, Sharding(layers=2), ""),
    "replaced": (replaced, Sharding(), REPLACED),
    "replaced, then a step": (
        replaced_and_stepped,
        Sharding(),
        REPLACED,
    ),
    "replaced in order": (replaced_after_finish, Sharding(), ""),
    "unsharded in order": (in_order, Sharding(), ""),
}


def misuse(rank: int, world_size: int) -> dict[str, str]:
    messages = {}
    for name, (act, sharding, _) in MISUSE.items():
        run = Run(sharding)
        run.net.other = partial(Net.forward, run.net)  # type: ignore[assignment]
        run.step(0)
        assert updates_left(run.muon) > 0
        messages[name] = raised(lambda act=act, run=run: act(run))  # type: ignore[misc]
    return messages


def test_misuse_of_weights_with_a_pending_update_is_an_error() -> None:
    for messages in run_ranks(misuse, 2):
        for name, message in messages.items():
            expected = MISUSE[name][2]
            assert expected in message, name
            assert bool(message) == bool(expected), name
            assert not message or "finish_step()" in message


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("no memory for the new plan")


def part_replaced(rank: int, world_size: int) -> tuple[str, bool, int, bool]:
    """After a refused `rebuild` and the replacement of a weight: the error, whether the remaining weights are right,
    held bytes, and pending updates."""
    ours, theirs = (Run(Sharding(), overlap=overlap) for overlap in ("forward", "none"))
    engine_of = muon.engine_of
    muon.engine_of = refuse if rank == 1 else engine_of
    assert "no memory for the new plan" in raised(ours.muon.rebuild)
    muon.engine_of = engine_of
    for run in (ours, theirs):
        run.step(0)
    next(ours.net.layers[1].children())._apply(torch.clone)
    message = raised(ours.muon.finish_step)
    pairs = zip(ours.named, ours.weights(), theirs.weights(), strict=True)
    others = all(torch.equal(a, b) for (name, _), a, b in pairs if name != "layers.1.up.weight")
    return message, others, buffers(ours), (updates_left(ours.muon) > 0)


def test_unreplaced_parameters_keep_the_pending_update() -> None:
    for message, others, held, left in run_ranks(part_replaced, 2):
        assert message.startswith("layers.1.up.weight: storage was replaced")
        assert (others, held, left) == (True, 0, False)


def forgotten(rank: int, world_size: int) -> bool:
    """Whether a model keeps a closed Muon."""
    run = Run(Sharding())
    run.step(0)
    run.muon.close()
    closed = weakref.ref(run.muon)
    del run.muon
    gc.collect()
    return closed() is None


def test_a_model_holds_no_reference_to_a_closed_muon() -> None:
    assert run_ranks(forgotten, 2) == [True, True]


class Bare(nn.Module):
    """Matrices outside of FSDP2's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def refusals(rank: int, world_size: int) -> list[str]:
    mesh: DeviceMesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    bare, run = Bare(), Run(Sharding())
    parallelize_module(bare, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    forward = Muon(bare.named_parameters(), overlap="forward")
    half = Bare()
    fully_shard(half.inner, mesh=mesh)
    fully_shard(half.outer, mesh=mesh)
    unattached = Muon(half.named_parameters(), overlap="forward")
    for param in half.parameters():
        param.grad = torch.ones_like(param)
    return [
        raised(lambda: apply_in_forward(bare, forward)),
        raised(lambda: apply_in_forward(run.net, Muon(run.net.named_parameters()))),
        raised(unattached.step),
        raised(lambda: apply_in_forward(half.inner, unattached)),
        raised(lambda: apply_in_forward(run.net, run.muon)),
    ]


def test_unfit_results_are_refused_before_the_first_pending_update() -> None:
    for bare, none, unattached, part, twice in run_ranks(refusals, 2):
        assert twice == "apply_in_forward: was called for this Muon before; call it only once"
        assert "inner.weight, outer.weight are in no module of fully_shard" in bare
        assert "build Muon with overlap = 'forward'" in none
        assert "call titan_muon.apply_in_forward(model, optimizer) once, before the first step" in unattached
        assert "outer.weight are in no module" in part
        assert "inner.weight" not in part
