"""Every rule and option on every layout equals one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.dist.harness import run_ranks
from tests.dist.step.test_muon_layouts import CASES, EXPERT_CASES, EXPERTS, MATRICES, STEPS
from tests.reference_muon import ReferenceRule
from tests.shared import drawn
from titan_muon import Muon

RULES: dict[str, dict[str, object]] = {
    "normuon": {"rule": "normuon", "beta2": 0.9},
    "cautious": {"cautious": True, "weight_decay": 0.5},
    "both": {"rule": "normuon", "cautious": True, "weight_decay": 0.5},
    "adamuon": {"rule": "adamuon", "beta2": 0.9, "nesterov": False},
    "muonh": {"rule": "muonh", "weight_decay": 0.0},
    "schedules": {"momentum_warmup_steps": 2, "decay_follows_lr": True, "update_factor": 0.5, "adjust_lr_fn": 0.18},
    "hold": {"idle": "hold"},
    "normuon_hold": {"rule": "normuon", "idle": "hold", "momentum": 0.8},
}
FIRST_IDLE_STEP = 1


def equal(rule: str, value: Tensor, expected: Tensor) -> bool:
    """Bit for bit; with MuonH up to the order of the sum over ranks, and the rounding of an update in bfloat16."""
    return torch.allclose(value, expected, rtol=1e-4, atol=1e-5) if rule == "muonh" else torch.equal(value, expected)


def check_cases(rank: int, world_size: int, exchange: str) -> list[str]:
    """Train all layouts of this world with every rule; names of tensors with a difference from the reference."""
    shapes: dict[str, tuple[int, ...]] = {}
    placed: dict[str, tuple[object, tuple[Placement, ...]]] = {}
    for cases, tensors in ((CASES, MATRICES), (EXPERT_CASES, EXPERTS)):
        for case in cases[world_size]:
            mesh = init_device_mesh("cpu", case.mesh)
            for name, shape in tensors.items():
                key = f"{case.name}.{name}"
                shapes[key], placed[key] = shape, (mesh, case.placements)

    def distributed(full: dict[str, Tensor], key: str) -> Tensor:
        mesh, placements = placed[key]
        return distribute_tensor(full[key].clone(), mesh, placements, src_data_rank=None)

    different = []
    for rule, options in RULES.items():
        initial = drawn(shapes, seed=0)
        params = {key: nn.Parameter(distributed(initial, key)) for key in shapes}
        reference = ReferenceRule(initial, **options)
        optimizer = Muon(list(params.items()), lr=0.02, exchange=exchange, orthogonalize="reference", **options).build()
        optimizer.param_groups[0]["initial_lr"] = 0.02
        for step in range(STEPS):
            grads = drawn(shapes, seed=step + 1)
            for name, grad in grads.items() if "idle" in options and step >= FIRST_IDLE_STEP else ():
                # The second expert of a stack, or every other matrix; and a row of zeros in a matrix.
                idle = grad[1] if grad.ndim == 3 else grad if list(grads).index(name) % 2 == step % 2 else grad[:1]
                idle.zero_()
            for key, param in params.items():
                param.grad = distributed(grads, key)
            optimizer.step()
            reference.step(grads)
            # As a scheduler would.
            reference.lr = optimizer.param_groups[0]["lr"] = 0.02 / (step + 2)
        for key, param in params.items():
            expected = distributed(reference.params, key).to_local()
            if not equal(rule, param.to_local(), expected):
                different.append(f"{rule} {key}: parameter")
            moments = reference.moments.get(key, [])
            assert len(optimizer.state[param]) == 1 + len(moments)
            for index, expected in enumerate(moments):
                kept = optimizer.state[param][f"second_moment.{index}"].to_local()
                if kept.numel() and not torch.equal(kept, expected):
                    different.append(f"{rule} {key}: second moment {index}")
    return different


@pytest.mark.parametrize(
    ("world_size", "exchange"), [(2, "all_to_all"), (4, "all_to_all"), (8, "all_to_all"), (4, "all_gather")]
)
def test_every_rule_on_every_layout_equals_the_reference(world_size: int, exchange: str) -> None:
    assert run_ranks(check_cases, world_size, exchange) == [[]] * world_size


def refusal(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    param = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)], src_data_rank=None))
    messages = []
    for mode in ("distributed", "duplicated", "blockwise"):
        try:
            Muon([("w", param)], rule="normuon", tensor_parallel=mode).build()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_normuon_refuses_a_matrix_without_an_owner_of_the_whole() -> None:
    for messages in run_ranks(refusal, 2):
        assert len(messages) == 3
        assert all("rule = 'normuon' needs whole matrices" in text for text in messages)
