"""AdamH equals its definition on every layout, and its matrices keep their norms."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.parity.layouts import LAYOUTS, drawn, like, placed
from tests.shared import equal, local, message
from tests.unit.test_hybrid import Decoder, train
from titan_muon import Expert, Hybrid, Rule
from titan_muon.adam import AdamH

NAMES, STEPS = ("wide", "uneven", "short"), 4
LAYOUTS_OF_HEADS = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "tp columns", "plain")
OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
HEAD = [Rule(match="lm_head.weight", optimizer="adamh", options={"lr": 0.1})]


def by_definition(name: str) -> Tensor:
    """The weights after the steps (arXiv:2606.16899, with Adam's update)."""
    weights, m, v = drawn(name, 0), torch.zeros(()), torch.zeros(())
    beta1, beta2 = OPTIONS["betas"]
    for step in range(1, STEPS + 1):
        grad = drawn(name, step)
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + OPTIONS["eps"])
        radius = weights.norm()
        weights = weights - OPTIONS["lr"] / step * radius * update / update.norm()
        weights = radius * weights / weights.norm()
    return weights


def stepped(params: dict[str, nn.Parameter], **options: Any) -> AdamH:
    """AdamH after the steps, with a rate that a scheduler changes."""
    adamh = AdamH(params.items(), **OPTIONS, **options)
    for step in range(1, STEPS + 1):
        adamh.param_groups[0]["lr"] = OPTIONS["lr"] / step
        for name, param in params.items():
            param.grad = like(drawn(name, step), param)
        adamh.step()
    return adamh


def differences(rank: int, world_size: int) -> list[str]:
    wrong = []
    for layout in LAYOUTS_OF_HEADS:
        params = {name: nn.Parameter(placed(drawn(name, 0), LAYOUTS[layout])) for name in NAMES}
        stepped(params, offload="state" if layout == "hsdp" else "none")
        for name, param in params.items():
            expected = local(like(by_definition(name), param))
            if not torch.allclose(local(param), expected, rtol=1e-5, atol=1e-6):
                wrong.append(f"{layout}: {name}")
    return wrong


def hybrid_with_a_nan(rank: int, world_size: int) -> tuple[str, str]:
    """The errors of a step with a NaN in one rank's shard of the head, and after the step."""
    model = Decoder()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    assert isinstance(model, FSDPModule)
    model.set_force_sum_reduction_for_comms(True)
    hybrid, errors = Hybrid(model, 0.02, rules=HEAD), []
    for step in range(2):
        tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        if step == 1 and rank == 1:
            local(model.lm_head.weight.grad).fill_(torch.nan)
        errors.append(message(hybrid.step))
        hybrid.zero_grad()
    assert not errors[0]
    return errors[1], message(hybrid.check_last_step)


def without_a_gradient_on_one_rank() -> tuple[list[str], bool]:
    """The errors of two steps, and whether the second changed no weights."""
    params = {name: nn.Parameter(placed(drawn(name, 0), LAYOUTS["fsdp"])) for name in NAMES[:2]}
    adamh, errors, before = AdamH(params.items(), **OPTIONS), [], dict[str, Tensor]()
    for step in range(1, 3):
        for name, param in params.items():
            before[name], param.grad = local(param).clone(), like(drawn(name, step), param)
        if step == 2 and dist.get_rank() == 1:
            params["uneven"].grad = None
        errors.append(message(adamh.step))
    return errors, all(torch.equal(local(param), before[name]) for name, param in params.items())


def zeros_on_another_mesh(rank: int, world_size: int) -> str:
    """The error of a step in which one of two experts is zeros, and each expert's ranks share the head with others."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("expert", "head"))
    whole = torch.zeros(8, 8) if rank % 2 == 0 else torch.ones(8, 8)
    expert = nn.Parameter(DTensor.from_local(whole[:4].clone(), mesh["expert"], [Shard(0)]))
    head = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh["head"], [Shard(0)]))
    adamh = AdamH([("expert", expert), ("head", head)])
    expert.grad, head.grad = torch.ones_like(expert), torch.ones_like(head)
    return message(adamh.step)


def on_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    faults = hybrid_with_a_nan(rank, world_size), without_a_gradient_on_one_rank()
    return differences(rank, world_size), *faults, zeros_on_another_mesh(rank, world_size)


def test_adamh_equals_its_definition_on_shards_and_faults_are_errors_on_every_rank() -> None:
    results = run_ranks(on_ranks, 4, timeout=2 * SECONDS)
    for rank, (wrong, (during, after), (errors, kept), zeros) in enumerate(results):
        assert wrong == []
        assert not errors[0]
        assert ("uneven" if rank == 1 else "another rank raised in this step") in errors[1]
        assert kept
        assert ("expert: a matrix of zeros" if rank % 2 == 0 else "head: another rank raised") in zeros
        assert not during
        assert "lm_head.weight" in after


def test_a_hybrid_with_adamh_keeps_the_norm_of_the_head_and_resumes() -> None:
    rules = [
        *HEAD,
        Rule(match="layers.*.up.weight", optimizer="muon", options={"algorithm": "muonh", "weight_decay": 0.0}),
    ]
    model, other = Decoder(), Decoder(seed=1)
    before = model.lm_head.weight.detach().clone()
    hybrid, resumed = (
        Hybrid(m, 0.02, rules=rules, expert=Expert(orthogonalize="reference", on_bad_gradient="skip"))
        for m in (model, other)
    )
    assert hybrid.optimizers["adamh"].allowed == hybrid.optimizers["adamw"].allowed != ()
    train(model, hybrid, range(3))
    assert not torch.allclose(model.lm_head.weight, before, atol=1e-2)
    torch.testing.assert_close(model.lm_head.weight.norm(), before.norm(), rtol=1e-5, atol=0)
    train(other, resumed, range(1))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(hybrid.state_dict()))
    train(model, hybrid, range(3, 5))
    train(other, resumed, range(3, 5))
    assert equal(model.parameters(), other.parameters())


@pytest.mark.parametrize(
    ("param", "options", "text"),
    [
        (torch.ones(8), {}, "w: has shape (8,) and torch.float32, and adamh takes float32 matrices"),
        (torch.ones(8, 8).bfloat16(), {}, "w: has shape (8, 8) and torch.bfloat16"),
        (torch.ones(8, 8), {"weight_decay": 0.1}, "weight_decay = 0.1: adamh keeps the norm of weights; set 0"),
        (torch.ones(8, 8), {"offload": "parameters"}, "offload = 'parameters': adamh projects weights on the device"),
    ],
)
def test_parameters_and_options_that_do_not_fit_are_refused(param: Tensor, options: dict[str, Any], text: str) -> None:
    assert text in message(lambda: AdamH([("w", nn.Parameter(param))], **options))


def test_a_matrix_of_zeros_is_refused_in_the_first_step_and_weights_stay() -> None:
    zeros, ones = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    adamh = AdamH([("ones", ones), ("zeros", zeros)])
    for param in (zeros, ones):
        param.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="zeros: a matrix of zeros, which keeps the norm 0 under adamh"):
        adamh.step()
    assert torch.equal(ones, torch.ones(4, 4))
    assert adamh.param_groups[0]["lr"] == 1e-3


def test_averages_in_bfloat16_and_a_skipped_step() -> None:
    param = nn.Parameter(drawn("wide", 0))
    stepped({"wide": param}, state_dtype="bfloat16")
    torch.testing.assert_close(param.detach(), by_definition("wide"), rtol=0.02, atol=0.02)
    adamh = AdamH([("w", param)])
    param.grad, before = torch.full_like(param, torch.nan), param.detach().clone()
    adamh.step()
    assert torch.equal(param, before)
