"""Gathers in backward: the numbers of a run without `overlap`, in the same order on all ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.parity.table import SLOW
from tests.shared import local, muon_keywords
from titan_muon import Muon

OPTIONS: dict[str, Any] = {"lr": 0.02, "machine": SLOW}
BACKWARD: dict[str, Any] = {"overlap": "backward", "orthogonalize": "reference"}
WITHOUT: dict[str, Any] = {"overlap": "none", "orthogonalize": "reference"}
NAMES = tuple(f"layers.{index}.weight" for index in range(6))
SHAPE = (16, 12)
STEPS = 3


class Failed(Exception):
    pass


class Fail(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Failed


class Run:
    """A few matrices in rows over the ranks; gradients arrive in reverse order of the parameters."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        self.mesh = mesh
        self.params = {name: nn.Parameter(self.drawn(index)) for index, name in enumerate(NAMES)}
        self.muon = Muon(self.params.items(), **muon_keywords(**{**OPTIONS, **options})).build()
        self.gathered: list[int] = []
        gather = self.muon.exchange.gather

        def noted(index: int) -> None:
            self.gathered.append(index)
            gather(index)

        self.muon.exchange.gather = noted  # type: ignore[method-assign]

    def drawn(self, seed: int) -> DTensor:
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=None)

    def backward(
        self, step: int, names: tuple[str, ...] = NAMES, fails: str = "", nan: str = "", armed: bool = True
    ) -> None:
        """Backward of a step, from the last name of `names` to the first; raises before `fails`."""
        total = torch.zeros(())
        for name in names:
            grad = self.drawn(100 * (step + 1) + NAMES.index(name)).to_local()
            stored = self.params[name].to_local()
            term = ((Fail.apply(stored) if name == fails else stored) * grad).sum()
            total = total + (term * torch.nan if name == nan else term)
        with self.muon.overlap() if armed else nullcontext():
            total.backward()

    def step(self) -> None:
        self.muon.step()
        self.muon.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Parameters and momenta here."""
        params = list(self.params.values())
        tensors = [*params, *(self.muon.state[param]["momentum_buffer"] for param in params)]
        return [tensor.to_local().detach().clone() for tensor in tensors]


def same(a: Run, b: Run) -> bool:
    return all(map(torch.equal, a.tensors(), b.tensors()))


def plain(mesh: DeviceMesh, **options: Any) -> Run:
    run = Run(mesh, **options)
    for step in range(STEPS):
        run.backward(step)
        run.step()
    return run


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except (ValueError, Failed) as error:
        return str(error) or type(error).__name__
    return ""


# --- functions on every rank; both ranks run every function in one world ---


def every_gather(mesh: DeviceMesh, rank: int) -> tuple[list[int], list[int], list[int]]:
    """The plan's buckets, the gathers launched before the step, and all gathers."""
    run = Run(mesh, **BACKWARD)
    run.backward(0)
    before = list(run.gathered)
    run.step()
    return list(range(len(run.muon.plan.buckets))), before, run.gathered


def not_entered(mesh: DeviceMesh, rank: int) -> bool:
    armed, run = plain(mesh, overlap="backward"), Run(mesh, overlap="backward")
    for step in range(STEPS):
        run.backward(step, armed=False)
        assert not run.gathered[step * len(run.muon.plan.buckets) :], "nothing is launched outside of the context"
        run.step()
    return same(armed, run)


def first_parameters_first(mesh: DeviceMesh, rank: int) -> bool:
    run = Run(mesh, **BACKWARD)
    for step in range(STEPS):
        run.backward(step, NAMES[::-1])
        run.step()
    assert run.gathered == STEPS * list(range(len(run.muon.plan.buckets))), "a bucket waits for those before it"
    return same(run, plain(mesh, **WITHOUT))


def failing(mesh: DeviceMesh, rank: int, names: tuple[str, str]) -> tuple[bool, int]:
    """Includes the gathers launched before the error."""
    run = Run(mesh, **BACKWARD)
    initial = run.tensors()
    run.backward(0)
    run.step()
    first, launched = run.tensors(), len(run.gathered)
    assert not any(map(torch.equal, initial, first))
    assert raised(lambda: run.backward(7, fails=names[rank])) == "Failed"
    launched = len(run.gathered) - launched
    run.muon.zero_grad()
    assert all(map(torch.equal, first, run.tensors())), "nothing is left behind"
    for step in range(1, STEPS):
        run.backward(step)
        run.step()
    return same(run, plain(mesh, **WITHOUT)), launched


def failing_and_then_not_entered(mesh: DeviceMesh, rank: int) -> bool:
    run = Run(mesh, **BACKWARD)
    assert raised(lambda: run.backward(7, fails=NAMES[2])) == "Failed"
    for step in range(STEPS):
        run.muon.zero_grad()
        run.backward(step, armed=False)
        run.step()
    return same(run, plain(mesh, **WITHOUT))


def between(mesh: DeviceMesh, rank: int, act: Callable[[Run, int], object]) -> bool:
    """Something else between backward and step."""
    run = Run(mesh, **BACKWARD)
    for step in range(STEPS):
        run.backward(step)
        act(run, step)
        run.step()
    return same(run, plain(mesh, **WITHOUT))


def start_anew(run: Run, step: int) -> None:
    run.muon.zero_grad()
    run.backward(7)
    run.muon.zero_grad()
    run.backward(step)


def move_storage(run: Run, step: int) -> None:
    for param in run.params.values():
        moved = nn.Parameter(param.detach().clone())
        moved.grad = param.grad
        torch.utils.swap_tensors(param, moved)


def changed(mesh: DeviceMesh, rank: int, change: Callable[[Run], object]) -> tuple[bool, str]:
    """Whether a step on gradients changed since backward leaves weights unchanged, and the error afterwards."""
    run = Run(mesh, **BACKWARD)
    weights = [param.to_local().detach().clone() for param in run.params.values()]
    run.backward(0)
    change(run)
    run.step()
    kept = all(map(torch.equal, weights, (param.to_local() for param in run.params.values())))
    run.backward(1)
    return kept, raised(run.step)


def clip(run: Run) -> None:
    torch.nn.utils.clip_grads_with_norm_(run.params.values(), 0.1, torch.tensor(1.0))


def accumulate(run: Run) -> None:
    run.backward(1, armed=False)


def accumulated_by_fsdp(mesh: DeviceMesh, rank: int) -> tuple[bool, str]:
    """As `changed`, with two backwards in one context. FSDP adds without a new version, here not to the first rows."""
    net = nn.Linear(8, 8, bias=False)
    fully_shard(net, mesh=mesh).set_force_sum_reduction_for_comms(True)
    muon = Muon([("layers.0.weight", net.weight)], **muon_keywords(**BACKWARD)).build()
    weight = local(net.weight).clone()
    with muon.overlap():
        for _ in range(2):
            net(torch.ones(2, 8))[:, 1::4].sum().backward()
    muon.step()
    return torch.equal(weight, local(net.weight)), raised(muon.step)


def other_momentum(run: Run) -> None:
    run.muon.param_groups[0]["momentum"] = 0.5


def scaled(mesh: DeviceMesh, rank: int) -> str:
    run = Run(mesh, **BACKWARD)
    run.backward(0)
    run.muon.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    return raised(run.step)


def plain_tensors(mesh: DeviceMesh, rank: int) -> str:
    return raised(lambda: Muon([("w", nn.Parameter(torch.ones(SHAPE)))], **muon_keywords(**BACKWARD)).build())


def own_groups(mesh: DeviceMesh, rank: int) -> bool:
    exchange = Run(mesh, **BACKWARD).muon.exchange
    others = (mesh.get_group(), dist.group.WORLD)
    return not any(group is other for group in exchange._groups for other in others)


SCENARIOS: dict[str, Callable[[DeviceMesh, int], Any]] = {
    "gathers": every_gather,
    "not entered": not_entered,
    "first parameters first": first_parameters_first,
    "failed apart": partial(failing, names=(NAMES[4], NAMES[1])),
    "failed and not entered": failing_and_then_not_entered,
    "state dict": partial(between, act=lambda run, step: run.muon.state_dict()),
    "started anew": partial(between, act=start_anew),
    "storage moved": partial(between, act=move_storage),
    "clipped": partial(changed, change=clip),
    "accumulated": partial(changed, change=accumulate),
    "accumulated by fsdp": accumulated_by_fsdp,
    "momentum": partial(changed, change=other_momentum),
    "scaled": scaled,
    "plain": plain_tensors,
    "groups": own_groups,
}


def run_scenarios(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {name: scenario(mesh, rank) for name, scenario in SCENARIOS.items()}


@cache
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(run_scenarios, 2)


def results_of(name: str) -> list[Any]:
    """Results of a scenario on both ranks."""
    return [results[name] for results in outcomes()]


def test_every_gather_with_a_buffer_starts_in_backward() -> None:
    for planned, before, after in results_of("gathers"):
        assert len(planned) > 2, "the case this test is for"
        assert before == after == planned
    assert results_of("groups") == [True, True], "buckets have separate process groups"


def test_a_failed_backward_leaves_no_pending_gather() -> None:
    """All ranks complete gathers launched by some ranks."""
    assert results_of("failed apart") == [(True, 0), (True, 2)]
    assert results_of("failed and not entered") == [True, True]


@pytest.mark.parametrize(
    "name", ["not entered", "first parameters first", "state dict", "started anew", "storage moved"]
)
def test_the_bits_are_those_of_a_run_without_overlap(name: str) -> None:
    assert results_of(name) == [True, True]


@pytest.mark.parametrize("name", ["clipped", "accumulated", "accumulated by fsdp", "momentum"])
def test_a_change_after_the_send_is_an_error(name: str) -> None:
    for kept, message in results_of(name):
        assert kept == (name != "clipped")
        assert "layers.0.weight" in message
        assert "changed between the send in backward" in message


def test_matrices_unfit_for_backward_gathers_are_refused() -> None:
    for message in results_of("scaled"):
        assert "GradScaler" in message
    for message in results_of("plain"):
        assert "overlap = 'backward' takes DTensors, and w are plain tensors" in message
