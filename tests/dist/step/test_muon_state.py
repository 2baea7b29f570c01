"""State of an optimizer: new iterations in a state dict, the precision of the momentum, a rank without parameters."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.dist.harness import on_ranks
from tests.dist.small_params import full, named, parameters, placed, set_gradients
from tests.shared import equal, local, message
from tests.unit.test_hybrid import Decoder
from titan_muon import Expert, Hybrid, Muon


def trained(optimizer: Muon, params: dict[str, nn.Parameter], mesh: DeviceMesh, seed: int) -> list[Tensor]:
    """A step with the gradients of a seed; the full parameters after it."""
    set_gradients(params, mesh, seed)
    optimizer.step()
    return [param.full_tensor() for param in params.values()]


def averages(optimizer: Muon, params: dict[str, nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[param]["momentum_buffer"].full_tensor() for param in params.values()]


@on_ranks(2)
def test_a_load_of_other_iterations_plans_again_and_keeps_the_momentum(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    params = parameters(mesh)
    optimizer = Muon(named(params), lr=0.02, expert=Expert(orthogonalize="reference")).build()
    trained(optimizer, params, mesh, 1)
    before, flops = averages(optimizer, params), [matrix.flops for matrix in optimizer.plan.matrices]
    state = optimizer.state_dict()
    state["param_groups"][0]["ns_steps"] = 3
    optimizer.load_state_dict(state)
    assert [5 * matrix.flops for matrix in optimizer.plan.matrices] == [3 * f for f in flops]
    assert equal(before, averages(optimizer, params))
    copies = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    fresh = Muon(named(copies), lr=0.02, ns_steps=3, expert=Expert(orthogonalize="reference")).build()
    for param, copy_ in zip(params.values(), copies.values(), strict=True):
        fresh.state[copy_]["momentum_buffer"].copy_(optimizer.state[param]["momentum_buffer"])
    assert equal(trained(optimizer, params, mesh, 2), trained(fresh, copies, mesh, 2))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_momentum_of_bfloat16_weights_has_the_dtype_of_the_option(rank: int, dtype: torch.dtype) -> None:
    """After 300 equal gradients an average in bfloat16 stalls at 0.96."""
    param = nn.Parameter(placed(full("layers.0.weight", 0).bfloat16(), init_device_mesh("cpu", (2,))))
    param.grad = torch.ones_like(param)
    name = str(dtype).removeprefix("torch.")
    optimizer, again = (Muon([("w", param)], lr=0.0, state_dtype=name).build() for _ in range(2))
    for _ in range(300):
        optimizer.step()
    average = local(optimizer.state[param]["momentum_buffer"])
    assert average.dtype == dtype
    assert dtype == torch.bfloat16 or float((average - 1).abs().max()) < 1e-5
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(average, local(again.state[param]["momentum_buffer"]))


def frozen_rank(rank: int) -> str:
    params = parameters(init_device_mesh("cpu", (2,)))
    for parameter in params.values():
        parameter.requires_grad_(rank != 1)
    return message(Muon(named(params)).build)


def replaced_momentum(rank: int) -> str:
    """The error after rank 1 replaced a momentum."""
    params = parameters(init_device_mesh("cpu", (2,)))
    muon = Muon(named(params), offload="state").build()
    muon.step()
    if rank == 1:
        state = muon.state[params["layers.0.weight"]]
        state["momentum_buffer"] = state["momentum_buffer"].double()
    muon.step()
    return message(muon.step)


def skipped_by_one_scaler(rank: int) -> str:
    """The error after a step that a scaler with only rank 1's gradients skips, which changes nothing on this rank."""
    params = parameters(init_device_mesh("cpu", (2,)))
    muon = Muon(named(params)).build()
    tensors = [*params.values(), *(muon.state[param]["momentum_buffer"] for param in params.values())]
    before = [local(tensor).clone() for tensor in tensors]
    muon.grad_scale, muon.found_inf = None, torch.tensor([float(rank == 1)])  # type: ignore[attr-defined]
    muon.step()
    del muon.grad_scale, muon.found_inf  # type: ignore[attr-defined]
    assert equal(before, [local(tensor) for tensor in tensors])
    return message(muon.step)


def frozen_state_of_one_rank(rank: int) -> str:
    """The error of a load where rank 1 lacks the states of a parameter that was frozen after the save."""
    params = parameters(init_device_mesh("cpu", (2,)))
    muon = Muon(named(params)).build()
    state = muon.state_dict()
    next(iter(params.values())).requires_grad_(False)
    if rank == 1:
        state = {**state, "state": {key: value for key, value in state["state"].items() if key != 0}}
    return message(lambda: muon.load_state_dict(state))


def resharded_on_one_rank(rank: int) -> str:
    """The error of a rebuild after rank 1 replaced a parameter of AdamW by one with another placement."""
    model = Decoder()
    hybrid = Hybrid(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hybrid.step()
    group = next(group for group in hybrid.param_groups if "betas" in group)
    if rank == 1:
        group["params"][0] = nn.Parameter(placed(group["params"][0].detach(), init_device_mesh("cpu", (1,))))
    return message(hybrid.rebuild)


FAULTS: dict[Callable[[int], str], str] = {
    frozen_rank: "no parameter to train on ranks [1]",
    replaced_momentum: "layers.0.weight: the momentum was replaced",
    skipped_by_one_scaler: "GradScalers of only some ranks have found",
    frozen_state_of_one_rank: "is frozen, and the state dict has its states on rank 0 and not on rank 1; load one",
    resharded_on_one_rank: "resharded since its first step",
}


@on_ranks(2)
def test_a_fault_in_the_state_of_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    for act, text in FAULTS.items():
        assert text in act(rank), act.__name__
