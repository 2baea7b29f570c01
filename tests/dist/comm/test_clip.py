"""Gradient clipping and QK-clip on any layout equal clipping of the whole model in one process."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist import small_params
from tests.dist.harness import on_ranks, run_ranks
from tests.parity.layouts import LAYOUTS, mesh_of, placed
from tests.shared import local, message
from tests.unit.test_qk_clip import HEADS, LOGITS, batch, clipped, layer, model, whole_weights
from titan_muon import Muon, transformers_qk_clip
from titan_muon.owned import gather
from titan_muon.owned.param import owned_like, place_on_owners
from titan_muon.plugins.clip import OTHER_EXPERTS, GradientClip, clip_grad_norm_
from titan_muon.plugins.qk_clip import QKClip

SHAPES = ((7, 5), (16, 6), (4, 3, 5), (9,), (8, 8), (6, 5), (5, 6), (7, 3), (6, 3))
ALL = list(range(len(SHAPES)))
CASES = [
    (ALL, 0.5, 2.0),
    (ALL, 0.5, 3.0),
    (ALL, 0.5, math.inf),
    ([0, 3, 5, 7], 0.5, 2.0),
    ([1], 1e6, 2.0),
    ([], 0.5, 2.0),
]
"""Clipped parameters, the largest norm, and the order of the norm."""


def whole_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def owned(data: DeviceMesh, tensor: DeviceMesh | None, owner: int, gradient: Tensor) -> nn.Parameter:
    whole = gradient if tensor is None else small_params.placed(gradient, tensor)
    parameter = place_on_owners(whole, data, [owner]).requires_grad_()
    if parameter.to_local().numel() > 0:
        parameter.grad = parameter.detach().clone()
    return parameter


PLACED = ("fsdp beside tp", "fsdp x tp rows", "ep x rows", "plain", "hsdp")


@on_ranks(4)
def test_any_mixture_of_layouts_is_clipped_as_by_torch_in_one_process(rank: int) -> None:
    """The norm and the gradients of dense, strided, expert, plain, replicated and owned parameters."""
    dense, replicated, flat = (mesh_of(axes, ()) for axes in ("shard tp", "replicate shard", "shard"))
    for chosen, max_norm, norm_type in CASES:
        g = whole_gradients()
        parameters = [
            *(with_gradient(placed(value, LAYOUTS[name])) for name, value in zip(PLACED, g, strict=False)),
            owned(flat, None, 2, g[5]),
            owned(replicated, None, 1, g[6]),
            owned(dense["shard"], dense["tp"], 1, g[7]),
            owned(dense["shard"], dense["tp"], 0, g[8]),
        ]
        if chosen == ALL:
            norm = clip_grad_norm_(iter(parameters), max_norm, norm_type)
        else:
            norm = GradientClip(parameters, [parameters[i] for i in chosen], max_norm=max_norm, stage_ranks=4)()
        alone = list(map(with_gradient, whole_gradients()))
        total = torch.nn.utils.get_total_norm([p.grad for p in alone], norm_type)
        nn.utils.clip_grad_norm_([alone[i] for i in chosen], max_norm, norm_type)
        assert float(norm) == pytest.approx(float(total), rel=1e-5)
        for p, expected in zip(parameters, alone, strict=True):
            found = gather(p.grad if p.grad is not None else owned_like(p.to_local(), p))
            torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_experts_on_other_meshes_count_once_each_and_replicas_once(rank: int) -> None:
    """A parameter that tensor parallelism replicates, and other experts on equal meshes, as under Megatron-FSDP."""
    whole, beside = whole_gradients(), LAYOUTS["fsdp beside tp"]
    expert = with_gradient(placed(whole[5 + rank % 2], beside))
    setattr(expert, OTHER_EXPERTS, True)
    dense = with_gradient(placed(whole[0], beside))
    norm = float(clip_grad_norm_([dense, expert], math.inf))
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([whole[0], whole[5], whole[6]])), rel=1e-5)
    expert._mfsdp_parameter_group = object()  # type: ignore[attr-defined]
    refusal = message(lambda: clip_grad_norm_([dense, expert], 1.0))
    assert "a parameter of shape (5, 6) is on 2 of 4 ranks" in refusal or "shape (6, 5)" in refusal


def test_clip_grad_norm_needs_no_process_group() -> None:
    parameter = with_gradient(torch.tensor([3.0, 0.0, 4.0]))
    assert float(clip_grad_norm_(parameter, 1.0)) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
    parameter.grad[0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


@on_ranks(4)
def test_the_norm_sums_over_pipeline_stages_and_is_computed_in_float32(rank: int) -> None:
    """Stages with different parameters, some without a gradient; and bfloat16 gradients, whose steps are 0.4 %."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
    held = whole_gradients()[:2] if rank < 2 else whole_gradients()[2:]
    parameters = [*(with_gradient(small_params.placed(value, mesh)) for value in held), nn.Parameter(torch.zeros(3))]
    expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in whole_gradients()))
    norm = GradientClip(parameters, parameters, max_norm=1.0, stage_ranks=2)()
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    half = with_gradient(torch.full((4128,), 1.0, dtype=torch.bfloat16))
    norm = GradientClip([half], [half], max_norm=1.0, stage_ranks=4)()
    assert float(norm) == pytest.approx(4128**0.5, rel=1e-6)
    assert float(half.grad.double().norm()) == pytest.approx(1.0, rel=4e-3)


@on_ranks(2)
def test_a_rank_without_parameters_joins_the_collective(rank: int) -> None:
    """A parameter on rank 0 alone, and a step of Muon that a norm from rank 0 skips."""
    parameter = with_gradient(torch.full((4, 5), 2.0))
    held = [parameter] if rank == 0 else []
    for norm_type, expected in ((2.0, math.sqrt(80)), (math.inf, 1 / math.sqrt(20))):
        assert float(clip_grad_norm_(held, 1.0, norm_type, stages=2)) == pytest.approx(expected)
    assert float(GradientClip(held, held, max_norm=1.0, stage_ranks=1)()) == pytest.approx(1.0)
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert float(GradientClip([frozen], [], max_norm=1.0, stage_ranks=1)()) == 0.0
    shared = with_gradient(small_params.placed(torch.full((4, 6), math.nan)))
    muon = Muon([("weight", shared)])
    clip_grad_norm_([shared] if rank == 0 else [], 1.0, optimizer=muon)
    muon.step()
    assert "weight on rank 0" in message(muon.check_last_step)
    assert not local(shared).any()


@on_ranks(2)
def test_a_scaler_does_not_hide_the_norm_of_all_ranks(rank: int) -> None:
    """An infinite gradient on rank 1 alone leaves the weights of each rank."""
    parameter = with_gradient(small_params.placed(torch.ones(4, 6)))
    muon = Muon([("weight", parameter)])
    if rank == 1:
        local(parameter.grad).fill_(math.inf)
    clip_grad_norm_([parameter], 1.0, optimizer=muon)
    # As a GradScaler does, which looks at the gradients of this rank alone.
    muon.found_inf, muon.grad_scale = torch.tensor(float(rank)), None  # type: ignore[attr-defined]
    muon.step()
    assert not local(parameter).any()


# --- QK-clip: each rank observes only local tokens and heads ---

PROJECTED = ("fsdp", "tp columns", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "plain", "owned")


def placed_weights() -> dict[str, dict[str, Tensor]]:
    """The same projections once per layout; each `owned` projection has another owner."""
    mesh = init_device_mesh("cpu", (4,))
    whole = whole_weights()
    return {
        name: {
            key: place_on_owners(weight, mesh, [number % 4]) if name == "owned" else placed(weight, LAYOUTS[name])
            for number, (key, weight) in enumerate(whole.items())
        }
        for name in PROJECTED
    }


def observed(rank: int) -> Tensor:
    """A rank's observations: the largest logit of each head on one rank, smaller logits elsewhere."""
    return torch.tensor([logit if head % 4 == rank else logit / (2 + rank) for head, logit in enumerate(LOGITS)])


@on_ranks(4)
def test_every_layout_equals_clipping_of_whole_weights_with_a_single_collective(rank: int) -> None:
    weights = placed_weights()
    clip = QKClip([layer(tensors, name) for name, tensors in weights.items()])
    for _ in range(2):
        for name in weights:
            if name == "fsdp x tp rows":
                # Tensor parallelism: a rank computes half of the heads.
                half = rank % 2 * HEADS // 2
                clip.observe(name, torch.tensor(LOGITS[half : half + HEADS // 2]), first_head=half)
            else:
                clip.observe(name, observed(rank))
        with CollectiveCounter() as counter:
            clip.start_reduce()
            clip.apply()
        assert [call.payload for call in counter.calls] == [4 * HEADS * len(weights)], "one float32 for each head"
    expected = clipped(clipped(whole_weights(), LOGITS, 100.0, 0.5), LOGITS, 100.0, 0.5)
    for name, tensors in weights.items():
        for key, tensor in tensors.items():
            value = gather(tensor).detach() if isinstance(tensor, DTensor) else tensor
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=0, msg=f"{name}.{key}")


def clipped_llama(rank: int, world_size: int) -> dict[str, Tensor]:
    """The attention's weights after a clipped step of Transformers' Llama under FSDP2; each rank has a sequence."""
    llama = model()
    inputs = batch()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in llama.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(llama, mesh=mesh)
        inputs = {name: tensor[rank : rank + 1] for name, tensor in inputs.items()}
    clip = transformers_qk_clip(llama, threshold=2.0)
    llama(**inputs)
    clip.apply()
    projections = {name: p for name, p in llama.named_parameters() if "q_proj" in name or "k_proj" in name}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in projections.items()}


def test_attention_of_transformers_is_clipped_alike_under_fsdp() -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(clipped_llama, 2)
    (alone,) = run_ranks(clipped_llama, 1)
    for name, weight in alone.items():
        torch.testing.assert_close(first[name], weight)
        assert torch.equal(first[name], second[name])
