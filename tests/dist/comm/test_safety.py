"""Impossible requests are errors with a remedy on every rank, and never a hang."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, full, named, parameters, placed, set_gradients
from tests.shared import message
from titan_muon import Muon

# --- construction refused by every rank ---


def unnamed(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(params.values()).build()


def on_meta(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    local = torch.empty(8, 24, device="meta")
    return Muon(
        [("layers.0.weight", nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))]
    ).build()


def all_frozen(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    for param in params.values():
        param.requires_grad_(False)
    return Muon(named(params)).build()


def no_parameters(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon([{"params": [], "param_names": []}]).build()


def same_name(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon([("layers.0.weight", param) for param in params.values()]).build()


def partial_sum(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    tensor = DTensor.from_local(torch.ones(16, 24), mesh, [Partial()], run_check=False)
    return Muon([("layers.0.weight", nn.Parameter(tensor))]).build()


def strided(mesh: DeviceMesh) -> nn.Parameter:
    tensor = DTensor.from_local(torch.ones(24, 8).t(), mesh, [Shard(0)], run_check=False)
    assert not tensor.to_local().is_contiguous()
    return nn.Parameter(tensor)


def not_contiguous(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon([("layers.0.weight", strided(mesh))]).build()


def vector(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon([*named(params), ("norm.weight", nn.Parameter(placed(torch.ones(16), mesh)))]).build()


REFUSED = {
    unnamed: "needs the names of its parameters",
    on_meta: "layers.0.weight: on the meta device",
    all_frozen: "no parameter to train",
    no_parameters: "no parameter to train",
    same_name: "layers.0.weight: given to Muon twice",
    partial_sum: "layers.0.weight: Muon cannot read a parameter placed as P",
    not_contiguous: "layers.0.weight: its storage is not contiguous",
    vector: "norm.weight: Muon takes matrices",
}

# --- unequal construction on ranks ---


def another_order(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    pairs = named(params)
    return Muon(pairs if rank == 0 else pairs[::-1]).build()


def another_name(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon([(f"{name}.{rank}", param) for name, param in params.items()]).build()


def another_shape(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    params["layers.0.weight"] = nn.Parameter(placed(torch.ones(16, 24 + 8 * rank), mesh))
    return Muon(named(params)).build()


def one_more(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params)[rank:]).build()


def one_frozen(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    params["layers.1.weight"].requires_grad_(rank == 0)
    return Muon(named(params)).build()


def another_ns_steps(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params), ns_steps=5 - rank).build()


def another_exchange(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params), exchange=("all_to_all", "all_gather")[rank]).build()


def another_polynomial(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params), ns_coefficients=[((1.5, -0.5, 0.0), (3.4445, -4.7750, 2.0315))[rank]] * 5).build()


def another_momentum(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params), momentum=(0.95, 0.9)[rank]).build()


def another_wire_dtype(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> object:
    return Muon(named(params), wire_dtype=("bfloat16", "float32")[rank]).build()


DIFFERENT = {
    another_order: "their parameters differ",
    another_name: "their parameters differ",
    another_shape: "their parameters differ",
    one_more: "their parameters differ",
    one_frozen: "their parameters differ",
    another_ns_steps: "different hyperparameters",
    another_exchange: "their options differ",
    another_polynomial: "different hyperparameters",
    another_momentum: "different hyperparameters",
    another_wire_dtype: "their options differ",
}


class OutOfMemory(RuntimeError):
    """Like torch.OutOfMemoryError, which the CPU never raises."""


def out_of_memory(rank: int, world_size: int) -> tuple[str, str]:
    """Kind and text of the error if rank 0 has no memory for the momentum."""
    mesh = init_device_mesh("cpu", (world_size,))

    def fails(*_: Any, **__: Any) -> None:
        raise OutOfMemory("tried to allocate 2.00 GiB")

    muon = Muon(named(parameters(mesh)))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr("titan_muon.muon.with_states", fails)
        try:
            muon.build()
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


def strided_on_one_rank(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    param = strided(mesh) if rank == 1 else nn.Parameter(placed(torch.ones(16, 24), mesh))
    return message(lambda: Muon([("layers.0.weight", param)]).build())


# --- unusable gradients ---


def gradient_missing_here(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    if rank == 1:
        params["layers.1.weight"].grad = None


def gradient_missing_everywhere(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    params["layers.1.weight"].grad = None


def gradient_elsewhere(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    params["layers.1.weight"].grad = placed(full("layers.1.weight", 1), mesh, Replicate())


def gradient_elsewhere_on_one_rank(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    if rank == 1:
        gradient_elsewhere(rank, params, mesh)


def parameter_resharded(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Like an in-place conversion of a module: the parameter object stays with new storage."""
    param = params["layers.1.weight"]
    moved = nn.Parameter(placed(full("layers.1.weight", 0), mesh, Shard(1)))
    torch.utils.swap_tensors(param, moved)
    param.grad = placed(full("layers.1.weight", 1), mesh, Shard(1))


def parameter_replaced(rank: int, params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """The model has a new parameter; Muon's parameter gets no more gradients."""
    params["layers.1.weight"].grad = None


STOPPED = {
    gradient_missing_here: "no gradient for layers.1.weight",
    gradient_missing_everywhere: "no gradient for layers.1.weight",
    gradient_elsewhere: "layers.1.weight: the gradient's mesh or placements differ",
    gradient_elsewhere_on_one_rank: "layers.1.weight: the gradient's mesh or placements differ",
    parameter_resharded: "layers.1.weight",
    parameter_replaced: "no gradient for layers.1.weight",
}


def refuse(rank: int, world_size: int) -> dict[str, str]:
    """Messages of the constructions in REFUSED and DIFFERENT."""
    mesh = init_device_mesh("cpu", (world_size,))
    messages = {fn.__name__: message(partial(fn, parameters(mesh), mesh)) for fn in REFUSED}
    messages |= {fn.__name__: message(partial(fn, rank, parameters(mesh), mesh)) for fn in DIFFERENT}
    return messages


@cache
def refusals() -> list[dict[str, str]]:
    return run_ranks(refuse, 2, timeout=SECONDS)


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_impossible_plans_are_refused_at_construction(fn: Callable[..., object]) -> None:
    for messages in refusals():
        assert REFUSED[fn] in messages[fn.__name__]


@pytest.mark.parametrize("fn", DIFFERENT, ids=lambda fn: fn.__name__)
def test_different_plans_are_refused_on_every_rank(fn: Callable[..., object]) -> None:
    for messages in refusals():
        assert "ranks [1] planned another Muon step than rank 0" in messages[fn.__name__]
        assert DIFFERENT[fn] in messages[fn.__name__]


def test_an_exception_of_any_class_on_a_rank_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(out_of_memory, 2, timeout=SECONDS)
    assert first == ("OutOfMemory", "tried to allocate 2.00 GiB")
    assert second == ("RuntimeError", "OutOfMemory: tried to allocate 2.00 GiB (on rank 0)")


LR, DECAY = 0.02, 0.1
ASKED = {
    "the next step": lambda optimizer: optimizer.step(),
    "a checkpoint": lambda optimizer: optimizer.state_dict(),
    "the end": lambda optimizer: optimizer.check_last_step(),
}
"""Calls with an error after a failed step."""


@dataclass(frozen=True)
class Stopped:
    """Errors after a failed step, and the state of the weights."""

    error_of_the_step: str
    error_when_asked: str
    no_update: bool
    stood: bool
    goes_on: bool


def stop(rank: int, world_size: int, change: Callable[..., None], asked: str, **options: Any) -> Stopped:
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    optimizer = Muon(named(params), lr=LR, weight_decay=DECAY, **options).build()
    optimizer.step()
    change(rank, params, mesh)
    spoiled = params["layers.1.weight"]
    before = spoiled.to_local().clone()
    error_of_the_step = message(optimizer.step)
    # Ranks with the gradient decay their shards.
    no_update = any(torch.equal(spoiled.to_local(), kept) for kept in (before, before * (1 - LR * DECAY)))
    after = [param.to_local().clone() for param in params.values()]
    error_when_asked = message(partial(ASKED[asked], optimizer))
    stood = all(torch.equal(a, b.to_local()) for a, b in zip(after, params.values(), strict=True))
    goes_on = True
    if change is not parameter_resharded:
        set_gradients(params, mesh, 2)
        goes_on = message(optimizer.step) == message(optimizer.step) == ""
    return Stopped(error_of_the_step, error_when_asked, no_update, stood, goes_on)


@pytest.mark.parametrize("fn", STOPPED, ids=lambda fn: fn.__name__)
def test_unusable_gradients_give_no_update_and_an_error_on_every_rank(fn: Callable[..., None]) -> None:
    for result in run_ranks(stop, 2, fn, "the next step", timeout=SECONDS):
        assert result.error_of_the_step == "", "a rank that raised alone would leave the others waiting"
        assert STOPPED[fn] in result.error_when_asked
        assert result.no_update
        assert result.stood
        assert result.goes_on, "told once"


@pytest.mark.parametrize("asked", ["a checkpoint", "the end"])
def test_check_last_step_reports_the_last_step(asked: str) -> None:
    for result in run_ranks(stop, 2, gradient_missing_here, asked, timeout=SECONDS):
        assert "no gradient for layers.1.weight" in result.error_when_asked


def change_group_on_one_rank(rank: int, world_size: int, changes: dict[str, Any]) -> str:
    """The error after rank 1 changed the group."""
    optimizer = Muon(named(parameters(init_device_mesh("cpu", (world_size,))))).build()
    if rank == 1:
        optimizer.param_groups[0].update(changes)
    optimizer.step()
    return message(optimizer.step)


@pytest.mark.parametrize("changes", [{"ns_steps": 3}, {"ns_coefficients": [[1, 2, 3]]}, {"eps": 1e-3}], ids=str)
def test_an_iteration_changed_on_a_rank_is_an_error_on_every_rank(changes: dict[str, Any]) -> None:
    for text in run_ranks(change_group_on_one_rank, 2, changes, timeout=SECONDS):
        assert "ns_steps, ns_coefficients or eps changed since Muon was built" in text


def object_in_a_group(rank: int, world_size: int) -> str:
    optimizer = Muon(named(parameters(init_device_mesh("cpu", (world_size,)))))
    objects = [object() for _ in range(1 + rank)]
    optimizer.param_groups[0]["framework"] = objects[-1]
    optimizer.build()
    optimizer.step()
    return message(optimizer.step) or message(optimizer.check_replicas)


def test_an_object_of_a_framework_in_a_group_is_not_compared() -> None:
    assert run_ranks(object_in_a_group, 2, timeout=SECONDS) == ["", ""]


def plain_gradient_missing_on_one_rank(rank: int, world_size: int) -> str:
    weight = nn.Parameter(full("layers.0.weight", 0))
    optimizer = Muon([("layers.0.weight", weight)]).build()
    weight.grad = full("layers.0.weight", 1) if rank == 0 else None
    optimizer.step()
    return message(optimizer.step)


def test_replicas_of_a_plain_tensor_agree_on_a_missing_gradient() -> None:
    """Under DDP a single rank orthogonalizes for all ranks, so no rank may continue alone."""
    for text in run_ranks(plain_gradient_missing_on_one_rank, 2, timeout=SECONDS):
        assert "no gradient for layers.0.weight" in text


def test_wrong_storage_on_a_rank_is_refused_on_every_rank() -> None:
    for text in run_ranks(strided_on_one_rank, 2, timeout=SECONDS):
        assert "layers.0.weight: its storage is not contiguous" in text


# --- a dead rank ---


class Dying(CollectiveCounter):
    """Ends the process at the second exchange."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if sum(call.name == "alltoall_base" for call in self.calls) == 2:
            os._exit(1)
        return super().run(func, args, kwargs)


def die_in_step(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 dies; ranks 0, 2 and 3 write errors into the folder."""
    mesh = init_device_mesh("cpu", (world_size,))
    optimizer = Muon(named(parameters(mesh))).build()
    optimizer.step()
    if rank == 1:
        with Dying():
            optimizer.step()
    try:
        optimizer.step()
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
    # The harness ends all ranks after the first failure.
    while len(list(Path(folder).iterdir())) < world_size - 1:
        time.sleep(0.01)


def test_the_death_of_a_rank_in_a_step_is_an_error_on_the_surviving_ranks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(die_in_step, 4, str(tmp_path), timeout=SECONDS)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2", "3"}


def sharded_after_muon(rank: int, world_size: int) -> tuple[str, bool]:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = Muon(model.named_parameters())
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model(torch.randn(4, 32)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        params = optimizer.param_groups[0]["params"]
        return str(error), all(map(torch.equal, before, params))
    return "", False


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharding_the_model_after_muon_is_an_error_in_the_first_step(world_size: int) -> None:
    """The first step would otherwise train nothing, and the second name another remedy."""
    for text, untouched in run_ranks(sharded_after_muon, world_size, timeout=SECONDS):
        assert "no gradient for 0.weight or any other parameter of Muon in the first step" in text
        assert "after fully_shard" in text
        assert untouched
