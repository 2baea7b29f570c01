"""Plain tensors on every rank, as under DDP: replicas are orthogonalized once, and unequal tensors stay separate."""

import io
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, message
from titan_muon import Muon
from titan_muon.plan.summary import summarize

BF16 = 2
SHAPE = (16, 24)
EVEN = {f"layers.{i}.weight": SHAPE for i in range(8)}
MIXED = {"wide": (24, 40), "tall": (21, 10), "experts": (3, 8, 12)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    params: dict[str, nn.Parameter], place: Callable[[str, Tensor], Tensor], shapes: Any, **options: Any
) -> tuple[Muon, list[str]]:
    """Names of tensors with a difference from the reference after three steps of Muon."""
    muon, reference = Muon(list(params.items()), **OPTIONS, **options).build(), ReferenceMuon(drawn(shapes, 0))
    for seed in range(1, 4):
        grads = drawn(shapes, seed)
        for name, param in params.items():
            param.grad = place(name, grads[name].clone())
        muon.step()
        reference.step(grads)
    averages = {name: muon.state[param]["momentum_buffer"] for name, param in params.items()}
    pairs = [(params, reference.params), (averages, reference.average)]
    wrong = [
        name
        for ours, theirs in pairs
        for name in ours
        if not torch.equal(*map(local, (ours[name], place(name, theirs[name]))))
    ]
    return muon, wrong


def under_ddp(rank: int, world_size: int) -> tuple[list[str], int, int, list[tuple[str, int]], bool]:
    """Differences from one process; FLOPs of a step on this rank and on all; sent bytes, and whether they were
    planned."""
    params = {name: nn.Parameter(value) for name, value in drawn(EVEN, 0).items()}
    muon, wrong = train(params, lambda name, value: value, EVEN)
    with FlopCounterMode(display=False) as flops, CollectiveCounter() as counter:
        muon.step()
    pieces = [(call.name, call.sent) for call in counter.calls if call.name != "allreduce"]
    cost = summarize(muon.plan).ranks[rank]
    planned = (cost.collectives, cost.bytes_sent) == (len(pieces), sum(sent for _, sent in pieces))
    return wrong, flops.get_total_flops(), sum(matrix.flops for matrix in muon.plan.matrices), pieces, planned


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_replicas_are_orthogonalized_once_and_only_results_are_sent(world_size: int) -> None:
    elements = len(EVEN) * SHAPE[0] * SHAPE[1]
    for wrong, flops, every, pieces, planned in run_ranks(under_ddp, world_size, timeout=SECONDS):
        assert wrong == []
        assert flops == every // world_size
        assert sum(sent for _, sent in pieces) == elements * BF16 * (world_size - 1) // world_size
        assert all(sent for _, sent in pieces), "nothing is gathered, since the gradients are everywhere"
        assert planned


def beside_torch(rank: int, world_size: int) -> bool:
    """Whether DistributedDataParallel trains as torch.optim.Muon does on its reduced gradients."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 8, bias=False)))
    copies = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    ours = Muon(model.named_parameters(), **OPTIONS).build()
    theirs = torch.optim.Muon(copies, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        model(torch.randn(4, 16)).square().sum().backward()
        for copy, param in zip(copies, model.parameters(), strict=True):
            assert param.grad is not None
            copy.grad = param.grad.clone()
        ours.step()
        theirs.step()
        model.zero_grad()
    assert any(bucket.owners for bucket in ours.plan.buckets)
    return all(torch.equal(copy, param) for copy, param in zip(copies, model.parameters(), strict=True))


def test_ddp_trains_as_torchs_muon() -> None:
    assert run_ranks(beside_torch, 2, timeout=SECONDS) == [True, True]


def mixed(rank: int, world_size: int, **options: Any) -> tuple[list[str], int]:
    """Plain, replicated and sharded tensors: differences from one process, and the number of matrices orthogonalized
    here."""
    mesh = init_device_mesh("cpu", (world_size,))
    shapes = {f"{kind}.{name}": shape for kind in ("plain", "copied", "cut") for name, shape in MIXED.items()}

    def place(name: str, value: Tensor) -> Tensor:
        if name.startswith("plain"):
            return value
        placement = Replicate() if name.startswith("copied") else Shard(0)
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    params = {name: nn.Parameter(place(name, value)) for name, value in drawn(shapes, 0).items()}
    muon, wrong = train(params, place, shapes, **options)
    return wrong, muon.orthogonalized


def test_a_plan_holds_plain_replicated_and_sharded_parameters() -> None:
    results = run_ranks(mixed, 4, timeout=SECONDS)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert sum(done for _, done in results) == 3 * 5


def repeated(rank: int, world_size: int) -> tuple[list[str], int, int]:
    params = {name: nn.Parameter(value) for name, value in drawn(MIXED, 0).items()}
    muon, wrong = train(params, lambda name, value: value, MIXED, replicas="redundant")
    return wrong, muon.orthogonalized, len(muon.plan.buckets)


def test_redundant_replicas_are_orthogonalized_on_every_rank() -> None:
    assert run_ranks(repeated, 2, timeout=SECONDS) == [([], 5, 0)] * 2


def rank_specific_tensor(rank: int, world_size: int) -> tuple[bool, bool, str, list[str]]:
    """A plain tensor with rank-specific values beside a replica: correctness of both, and the warning."""
    own, copy = drawn({"own": SHAPE}, 10 + rank), drawn({"copy": SHAPE}, 0)
    params = {name: nn.Parameter(value.clone()) for name, value in (own | copy).items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muon = Muon(list(params.items()), **OPTIONS).build()
    reference = ReferenceMuon(own | copy)
    for seed in range(1, 3):
        grads = drawn({"own": SHAPE}, 20 * seed + rank) | drawn({"copy": SHAPE}, seed)
        for name, param in params.items():
            param.grad = grads[name].clone()
        muon.step()
        reference.step(grads)
    muon.check_last_step()
    right = [torch.equal(params[name], reference.params[name]) for name in ("own", "copy")]
    return right[0], right[1], muon.plan.reason, [str(warning.message) for warning in caught]


def test_a_rank_orthogonalizes_a_plain_tensor_with_rank_specific_values() -> None:
    for own, copy, reason, warned in run_ranks(rank_specific_tensor, 2, timeout=SECONDS):
        assert own, "another rank's result took its place"
        assert copy
        assert "own: plain tensors that differ between ranks; each rank orthogonalizes its own" in reason
        assert any("own: plain tensors whose values differ between ranks" in text for text in warned)


def on_some_ranks(rank: int, world_size: int) -> str:
    return message(lambda: Muon([(f"stages.{rank}.weight", nn.Parameter(torch.ones(SHAPE)))]).build())


def test_a_plain_tensor_on_some_ranks_only_is_refused() -> None:
    """For example a parameter of a pipeline stage, or a module on some ranks only."""
    for text in run_ranks(on_some_ranks, 2, timeout=SECONDS):
        assert "a parameter that only some ranks have must be a DTensor on their mesh" in text


def other_gradient(rank: int, grad: Tensor) -> Tensor | None:
    return grad * (1 + 0.02 * rank)


def nan_on_one(rank: int, grad: Tensor) -> Tensor | None:
    return torch.where(torch.arange(grad.numel()).view_as(grad) == 5, torch.nan, grad) if rank == 1 else grad


def missing_on_one(rank: int, grad: Tensor) -> Tensor | None:
    return grad if rank == 0 else None


def rounded_otherwise(rank: int, grad: Tensor) -> Tensor | None:
    return grad * (1 + 1e-5 * rank)


CHANGES = {
    other_gradient: "layers.3.weight: these plain tensors were equal on all ranks when Muon was built, but their",
    nan_on_one: "layers.3.weight: ",
    missing_on_one: "no gradient for layers.3.weight",
    rounded_otherwise: "",
}
"""Change of one replica's gradient, and the expected error."""


def spoil(rank: int, change: Callable[[int, Tensor], Tensor | None]) -> tuple[list[str], bytes]:
    """Errors of a step with a changed gradient and of the next two steps; and the weights."""
    params = {name: nn.Parameter(value) for name, value in drawn(EVEN, 0).items()}
    muon = Muon(list(params.items()), **OPTIONS).build()
    errors = []
    for seed in range(1, 4):
        for name, grad in drawn(EVEN, seed).items():
            params[name].grad = change(rank, grad) if seed == 1 and name == "layers.3.weight" else grad
        errors.append(message(muon.step))
    return errors, torch.stack([param.detach() for param in params.values()]).numpy().tobytes()


def spoil_each(rank: int, world_size: int) -> dict[str, tuple[list[str], bytes]]:
    return {change.__name__: spoil(rank, change) for change in CHANGES}


@cache
def spoiled() -> list[dict[str, tuple[list[str], bytes]]]:
    return run_ranks(spoil_each, 2, timeout=SECONDS)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_different_gradients_of_replicas_are_an_error_on_every_rank(change: Callable[..., Any]) -> None:
    results = [rank_results[change.__name__] for rank_results in spoiled()]
    assert len({weights for _, weights in results}) == 1, "copies are equal whatever their gradients were"
    for (first, second, third), _ in results:
        assert first == "", "a rank that raised alone would leave the others waiting"
        assert second.startswith(CHANGES[change])
        assert bool(second) == bool(CHANGES[change])
        assert third == "", "told once"


def steps_of(seeds: Iterable[int], params: dict[str, Tensor], state: Any = None) -> tuple[dict[str, Tensor], Any]:
    """Weights and state after a step with the gradients of every seed, from the passed weights and state."""
    named = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    muon = Muon(list(named.items()), **OPTIONS).build()
    if state is not None:
        muon.load_state_dict(state)
    for seed in seeds:
        for name, grad in drawn(MIXED, seed).items():
            named[name].grad = grad
        muon.step()
    return {name: param.detach() for name, param in named.items()}, muon.state_dict()


def step_on_ranks(rank: int, world_size: int, seed: int, saved: bytes) -> bytes:
    """As bytes, because tensors in a queue are lost with the sending process."""
    file = io.BytesIO()
    torch.save(steps_of([seed], *torch.load(io.BytesIO(saved))), file)
    return file.getvalue()


def test_a_state_dict_continues_with_any_number_of_replicas() -> None:
    """From one process to 4 ranks, to 2, and back to one: the bits of a single process."""
    reference = ReferenceMuon(drawn(MIXED, 0))
    for seed in range(1, 5):
        reference.step(drawn(MIXED, seed))
    file = io.BytesIO()
    torch.save(steps_of([1], drawn(MIXED, 0)), file)
    saved = file.getvalue()
    for world_size, seed in ((4, 2), (2, 3)):
        *_, saved = run_ranks(step_on_ranks, world_size, seed, saved, timeout=SECONDS)
    params, _ = steps_of([4], *torch.load(io.BytesIO(saved)))
    assert all(torch.equal(params[name], reference.params[name]) for name in MIXED)
