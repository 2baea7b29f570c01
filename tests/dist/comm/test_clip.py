"""Gradient clipping on any layout equals clipping of the whole model in one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dist.harness import run_ranks
from titan_muon.comm.clip import GradientClip, clip_grad_norm_
from titan_muon.owned import gather
from titan_muon.owned.param import owned_like, place_on_owners

SHAPES = ((7, 5), (16, 6), (4, 3, 5), (9,), (8, 8), (6, 5), (5, 6), (7, 3), (6, 3))


def whole_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected(clipped: list[int], max_norm: float) -> tuple[float, list[torch.Tensor]]:
    """In one process: the norm of all gradients, and the gradients after torch's clipping of `clipped`."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, whole_gradients(), strict=True):
        parameter.grad = gradient.clone()
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in whole_gradients()))
    if clipped:
        nn.utils.clip_grad_norm_([parameters[i] for i in clipped], max_norm)
    return norm, [parameter.grad for parameter in parameters]


def laid_out(mesh: DeviceMesh | None, placements: tuple[Placement, ...], gradient: torch.Tensor) -> nn.Parameter:
    if mesh is None:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        return parameter
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient, mesh, placements)
    return parameter


def owned(
    data: DeviceMesh, tensor: DeviceMesh | None, owner: int, gradient: torch.Tensor, holder: int | None = None
) -> nn.Parameter:
    whole = gradient if tensor is None else distribute_tensor(gradient, tensor, [Shard(0)], src_data_rank=None)
    parameter = place_on_owners(whole, data, [owner], None if holder is None else [holder]).requires_grad_()
    if parameter.to_local().numel() > 0:
        parameter.grad = parameter.detach().clone()
    return parameter


def on_four_ranks() -> list[nn.Parameter]:
    """Dense, strided, expert, plain, replicated and owned parameters with their gradients."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    layouts = [
        (dense["tp"], (Shard(1),)),
        (dense, (_StridedShard(0, split_factor=2), Shard(0))),
        (experts, (Shard(1), Shard(0))),
        (None, ()),
        (replicated, (Replicate(), Shard(0))),
    ]
    parameters = [
        laid_out(mesh, placements, gradient)
        for (mesh, placements), gradient in zip(layouts, whole_gradients(), strict=False)
    ]
    flat = init_device_mesh("cpu", (4,))
    parameters += [
        owned(flat, None, 2, whole_gradients()[5]),
        owned(replicated, None, 1, whole_gradients()[6]),
        owned(dense["fsdp"], dense["tp"], 1, whole_gradients()[7]),
        owned(dense["fsdp"], dense["tp"], 1, whole_gradients()[8], holder=0),
    ]
    return parameters


def clip_on_four_ranks(rank: int, world_size: int, clipped: list[int], max_norm: float) -> tuple[float, list]:
    parameters = on_four_ranks()
    clip = GradientClip(parameters, [parameters[i] for i in clipped], max_norm=max_norm, stage_ranks=world_size)
    return float(clip()), whole(parameters)


def clip_all_on_four_ranks(rank: int, world_size: int, max_norm: float, norm_type: float) -> tuple[float, list]:
    parameters = on_four_ranks()
    return float(clip_grad_norm_(iter(parameters), max_norm, norm_type)), whole(parameters)


def whole(parameters: list[nn.Parameter]) -> list:
    gradients = [gather(p.grad if p.grad is not None else owned_like(p.to_local(), p)) for p in parameters]
    return [gradient.numpy() for gradient in gradients]


@pytest.mark.parametrize(
    ("clipped", "max_norm"), [(list(range(len(SHAPES))), 0.5), ([0, 3, 5, 7], 0.5), ([1], 1e6), ([], 0.5)]
)
def test_clip_equals_single_process(clipped: list[int], max_norm: float) -> None:
    norm, gradients = expected(clipped, max_norm)
    for found_norm, grads in run_ranks(clip_on_four_ranks, 4, clipped, max_norm):
        assert found_norm == pytest.approx(norm, rel=1e-6)
        for got, want in zip(grads, gradients, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clip_grad_norm_is_torchs_on_any_mixture_of_meshes(norm_type: float) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, whole_gradients(), strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5, norm_type)
    for found_norm, grads in run_ranks(clip_all_on_four_ranks, 4, 0.5, norm_type):
        assert found_norm == pytest.approx(float(norm), rel=1e-5)
        for got, parameter in zip(grads, parameters, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(torch.from_numpy(got), parameter.grad, rtol=1e-5, atol=1e-7)


def test_clip_grad_norm_needs_no_process_group() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    assert float(clip_grad_norm_(parameter, 1.0)) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
    parameter.grad[0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type = 0"):
        clip_grad_norm_([parameter], 1.0, 0)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def clip_two_stages(rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
    held = whole_gradients()[:2] if rank < 2 else whole_gradients()[2:]
    parameters = [laid_out(mesh, (Shard(0),), gradient) for gradient in held]
    parameters.append(nn.Parameter(torch.zeros(3)))
    return float(GradientClip(parameters, parameters, max_norm=1.0, stage_ranks=world_size // 2)())


def test_norm_sums_over_pipeline_stages() -> None:
    """Stages hold different parameters, some without a gradient; the norm on every rank must be the whole model's."""
    norm, _ = expected([], 1.0)
    assert run_ranks(clip_two_stages, 4) == pytest.approx([norm] * 4, rel=1e-6)


def clip_half_precision(rank: int, world_size: int) -> tuple[float, float]:
    parameter = nn.Parameter(torch.zeros(4128, dtype=torch.bfloat16))
    parameter.grad = torch.full((4128,), 1.0, dtype=torch.bfloat16)
    norm = GradientClip([parameter], [parameter], max_norm=1.0, stage_ranks=dist.get_world_size())()
    return float(norm), float(parameter.grad.double().norm())


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    """The steps of bfloat16 are 0.4 %."""
    norm, clipped = run_ranks(clip_half_precision, 2)[0]
    assert norm == pytest.approx(4128**0.5, rel=1e-6)
    assert clipped == pytest.approx(1.0, rel=4e-3)
