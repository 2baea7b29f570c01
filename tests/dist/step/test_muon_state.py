"""State of an optimizer: frozen parameters, NaN, zero gradients, saved state."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, full, named, parameters, set_gradients
from tests.reference_muon import ReferenceMuon
from tests.shared import equal
from titan_muon import Muon


def trained(optimizer: Muon, params: dict[str, nn.Parameter], mesh: DeviceMesh, seeds: Iterable[int]) -> list[Tensor]:
    """Steps with the gradients of some seeds; the full parameters after them."""
    for seed in seeds:
        set_gradients(params, mesh, seed)
        optimizer.step()
    return [param.full_tensor() for param in params.values()]


def freeze_one(rank: int, world_size: int) -> tuple[list[str], bool, bool]:
    """Names in the plan; whether the frozen parameter stayed, and whether the remaining parameters moved as in the
    reference."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    frozen = params["layers.0.weight"]
    frozen.requires_grad_(False)
    frozen.grad = None
    optimizer = Muon(named(params), lr=0.02, orthogonalize="reference").build()
    moving = {name: param for name, param in params.items() if param is not frozen}
    got = trained(optimizer, moving, mesh, [1, 2])
    reference = ReferenceMuon({name: full(name, 0) for name in moving})
    for seed in (1, 2):
        reference.step({name: full(name, seed) for name in moving})
    names = [parameter.fqn for parameter in optimizer.plan.parameters]
    stayed = torch.equal(frozen.full_tensor(), full("layers.0.weight", 0))
    return names, stayed, equal(got, reference.params.values())


def test_a_frozen_parameter_is_excluded() -> None:
    for names, stayed, equal_ in run_ranks(freeze_one, 2, timeout=SECONDS):
        assert names == ["layers.1.weight", "layers.2.experts"]
        assert stayed
        assert equal_


def rest(rank: int, world_size: int) -> bool:
    """Whether a step with zero gradients is weight decay alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    before = [param.full_tensor() for param in params.values()]
    for param in params.values():
        param.grad = torch.zeros_like(param)
    Muon(named(params), lr=0.02, weight_decay=0.1, orthogonalize="reference").build().step()
    return equal((b * (1 - 0.02 * 0.1) for b in before), (param.full_tensor() for param in params.values()))


def test_a_zero_gradient_applies_only_weight_decay() -> None:
    assert run_ranks(rest, 2, timeout=SECONDS) == [True, True]


def resume(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a new optimizer continues from saved state bit for bit, and has the saved momentum."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    optimizer = Muon(named(params)).build()
    trained(optimizer, params, mesh, [1, 2])
    saved = copy.deepcopy(optimizer.state_dict())
    copies = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    again = Muon(named(copies)).build()
    again.load_state_dict(saved)
    averages = [
        [o.state[p]["momentum_buffer"].full_tensor() for p in ps.values()]
        for o, ps in ((optimizer, params), (again, copies))
    ]
    same = equal(trained(optimizer, params, mesh, [3, 4]), trained(again, copies, mesh, [3, 4]))
    return same, equal(*averages)


def test_a_new_optimizer_with_saved_state_continues_bit_for_bit() -> None:
    assert run_ranks(resume, 2, timeout=SECONDS) == [(True, True)] * 2


def replan(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """After a load of new ns_steps: whether the plan has the new FLOPs, the momentum stays, and steps use ns_steps."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    optimizer = Muon(named(params), lr=0.02, orthogonalize="reference").build()
    trained(optimizer, params, mesh, [1])
    before = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in params.values()]
    flops = [matrix.flops for matrix in optimizer.plan.matrices]
    state = optimizer.state_dict()
    state["param_groups"][0]["ns_steps"] = 3
    optimizer.load_state_dict(state)
    after = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in params.values()]
    planned = [5 * matrix.flops for matrix in optimizer.plan.matrices] == [3 * f for f in flops]
    copies = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    fresh = Muon(named(copies), lr=0.02, ns_steps=3, orthogonalize="reference").build()
    for param, copy_ in zip(params.values(), copies.values(), strict=True):
        fresh.state[copy_]["momentum_buffer"].copy_(optimizer.state[param]["momentum_buffer"])
    same = equal(trained(optimizer, params, mesh, [2]), trained(fresh, copies, mesh, [2]))
    return planned, equal(before, after), same


def test_loading_changed_hyperparameters_plans_again_and_keeps_the_momentum() -> None:
    assert run_ranks(replan, 2, timeout=SECONDS) == [(True, True, True)] * 2


TOWERS = {"first.0.weight": (0, 1), "second.0.weight": (2, 3)}


def towers(rank: int, world_size: int) -> bool:
    """Of two parameters, each on two of four ranks and without gradient elsewhere, is this rank's the reference's?"""
    shape, params = (16, 24), {}
    for seed, (name, ranks) in enumerate(TOWERS.items()):
        mesh = DeviceMesh("cpu", list(ranks))
        whole = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + 10 * i)) for i in range(2)]
        mine = [t.chunk(2)[ranks.index(rank)] if rank in ranks else torch.empty(0) for t in whole]
        param, grad = (
            DTensor.from_local(t, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(24, 1))
            for t in mine
        )
        params[name] = nn.Parameter(param)
        if rank in ranks:
            params[name].grad = grad
            reference = ReferenceMuon({name: whole[0].clone()})
            reference.step({name: whole[1]})
            expected, own = reference.params[name].chunk(2)[ranks.index(rank)], params[name]
    Muon(named(params), lr=0.02, orthogonalize="reference").build().step()
    return torch.equal(own.to_local(), expected)


def test_a_rank_outside_a_parameters_mesh_needs_no_gradient() -> None:
    assert run_ranks(towers, 4, timeout=SECONDS) == [True] * 4
