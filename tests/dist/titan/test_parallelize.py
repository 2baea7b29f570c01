"""Every parallel layout of TorchTitan starts from the same parameters and computes the same loss and gradients.

The reference is the plain model on the whole batch, in the same process: no mesh, no FSDP. Each rank of a layout sees a
share of this batch, as in TorchTitan's trainer.
"""

from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch

from tests.dist.harness import run_ranks
from titan_muon.owned import gather, is_owned
from titan_muon.owned.param import owned_like
from titan_muon.titan import compat

BATCH, LENGTH, VOCAB = 4, 256, 258


@dataclass(frozen=True)
class Layout:
    """A model and the parallel degrees."""

    model: str
    degrees: dict[str, int] = field(default_factory=dict)
    load_balancer: str | None = "headtail"
    placement: str = "shard0"
    replicas: str = "each"

    def __str__(self) -> str:
        balancer = f"-{self.load_balancer}" if "cp" in self.degrees else ""
        placement = f"-{self.placement}-{self.replicas}" if self.placement == "owned" else ""
        return self.model + "".join(f"-{axis}{degree}" for axis, degree in self.degrees.items()) + balancer + placement


@dataclass(frozen=True)
class Outcome:
    """How a layout's run differs from the reference's; errors are relative, in the Frobenius norm."""

    loss: float
    reference_loss: float
    parameters_equal: bool
    gradient_errors: dict[str, float]


KEYS = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
DENSE, MOE, LLAMA, DEEPSEEK = "qwen3/tiny", "qwen3/two_layers", "llama3/tiny", "deepseek_v3/tiny"
# Fewer experts than ranks: FSDP2 shards experts, and owners hold whole experts.
FEW = "qwen3/two_experts"
LAYOUTS = {
    2: [
        Layout(MOE, {"shard": 2}),
        Layout(LLAMA, {"replicate": 2}),
        Layout(MOE, {"tp": 2}),
        Layout(MOE, {"shard": 2, "ep": 2}),
        Layout(MOE, {"tp": 2, "ep": 2}),
        Layout(MOE, {"cp": 2, "ep": 2}),
        Layout(DENSE, {"cp": 2}, load_balancer=None),
        Layout(DEEPSEEK, {"cp": 2}),
    ],
    4: [
        Layout(LLAMA, {"replicate": 2, "shard": 2}),
        Layout(LLAMA, {"shard": 2, "tp": 2}),
        Layout(LLAMA, {"tp": 4}),
        Layout(DENSE, {"tp": 2, "cp": 2}),
        Layout(MOE, {"shard": 4, "ep": 4}),
        Layout(MOE, {"shard": 2, "tp": 2, "ep": 2}),
        Layout(MOE, {"replicate": 2, "shard": 2, "ep": 2}),
        Layout(DEEPSEEK, {"shard": 2, "tp": 2, "ep": 4}),
        Layout(FEW, {"shard": 4}),
        Layout(FEW, {"shard": 4, "ep": 2}),
        Layout(FEW, {"replicate": 2, "shard": 2}),
        Layout(FEW, {"shard": 2, "tp": 2}),
    ],
}
# Every layout with owned matrices too, and HSDP with one owner among all replicas.
for _layouts in LAYOUTS.values():
    _layouts += [replace(layout, placement="owned") for layout in _layouts]
LAYOUTS[2].append(Layout(LLAMA, {"replicate": 2}, placement="owned", replicas="one"))
LAYOUTS[4].append(Layout(MOE, {"replicate": 2, "shard": 2, "ep": 2}, placement="owned", replicas="one"))
LAYOUTS[4].append(Layout(FEW, {"replicate": 2, "shard": 2}, placement="owned", replicas="one"))


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions with a restart at each of three packed documents, and labels with a few ignored tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels[0, :17] = -100
    starts = torch.tensor([[0, 40, 130], [0, 1, 255], [0, 64, 128], [0, 100, 101]])
    index = torch.arange(LENGTH).expand(BATCH, LENGTH)
    last_start = torch.where(index[:, :, None] >= starts[:, None], starts[:, None], 0).amax(-1)
    return tokens, index - last_start, labels


def _config(layout: Layout):
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    from models import qwen3
    from titan_muon.titan.model.parallelize import with_placement
    from titan_muon.titan.model.spec import model_spec
    from titan_muon.titan.recipe import Recipe
    from titan_muon.titan.recipe.sections import Placement

    qwen3.FLAVORS["two_layers"] = replace(qwen3.FLAVORS["moe_tiny"], layers=2)
    qwen3.FLAVORS["two_experts"] = replace(qwen3.FLAVORS["two_layers"], experts=2)
    spec = model_spec(*layout.model.split("/"), vocab_size=VOCAB)
    degrees = {"data_parallel_shard_degree": 1} | {KEYS[axis]: n for axis, n in layout.degrees.items()}
    return Trainer.Config(
        model_spec=with_placement(spec, Recipe(placement=Placement(muon=layout.placement, replicas=layout.replicas))),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend=compat.spmd_backend(
                "auto", owned=layout.placement == "owned", uneven_vocabulary=VOCAB % layout.degrees.get("tp", 1) != 0
            ),
            context_parallel_load_balancer=layout.load_balancer,
            **degrees,
        ),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        debug=DebugConfig(seed=0),
    )


def _initialized(model: torch.nn.Module) -> torch.nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def _reference(layout: Layout):
    """The plain model's loss, and the model with gradients."""
    from titan_muon.titan.model.attention import share_dense_mask

    config = _config(Layout(layout.model))
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    share_dense_mask(_initialized(model))
    tokens, positions, labels = _batch()
    logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    loss, _ = config.loss.build(compile_config=config.compile)(logits, labels, (labels != -100).sum())
    loss.backward()
    return loss.item(), model


def _parallel(layout: Layout, world_size: int):
    """The layout's loss, summed over ranks, and the model with gradients."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    compat.forget_meshes()
    config = _config(layout)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    _initialized(model)

    tokens, positions, labels = _batch()
    valid = (labels != -100).sum()
    if dims.dp_enabled:
        batch_mesh = dims.get_mesh("batch")
        rank, size = batch_mesh.get_local_rank(), batch_mesh.size()
        tokens, positions, labels = (t.chunk(size)[rank] for t in (tokens, positions, labels))
    kwargs = {"positions": positions, "attention_masks": model.get_attention_masks(positions)}
    if dims.cp_enabled:
        tokens, labels, kwargs = prepare_context_parallel_input(
            tokens, labels, kwargs, dims.get_mesh("cp"), torch.device("cpu"), layout.load_balancer
        )
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        loss, _ = config.loss.build(compile_config=config.compile)(model(tokens, **kwargs), labels, valid)
        loss.backward()
    loss = loss.detach()
    return (dist_utils.dist_sum(loss, dims.get_mesh("loss")) if dims.dp_cp_enabled else loss.item()), model


def _whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if is_owned(parameter) and parameter.grad is None:
        return gather(owned_like(parameter.to_local(), parameter))
    return gather(parameter.grad)


def _compare(rank: int, world_size: int) -> list[Outcome]:
    """Differences of each layout of this world from the reference, on rank 0. TorchTitan's experts round to bfloat16,
    which would hide an error below 5 %, so experts stay in float32 here."""
    compat.install()
    torch.autograd.set_multithreading_enabled(False)
    outcomes, references = [], {}
    for layout in LAYOUTS[world_size]:
        with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor, create=True):
            loss, model = _parallel(layout, world_size)
            whole = {name: (gather(p.detach()), _whole_gradient(p)) for name, p in model.named_parameters()}
            assert any(map(is_owned, model.parameters())) == (layout.placement == "owned")
            if rank == 0:
                if layout.model not in references:
                    references[layout.model] = _reference(layout)
                outcomes.append(_outcome(loss, whole, *references[layout.model]))
    return outcomes


def _outcome(loss: float, whole: dict, reference_loss: float, reference: torch.nn.Module) -> Outcome:
    expected = dict(reference.named_parameters())
    assert set(expected) == set(whole)
    equal = all(torch.equal(parameter, expected[name]) for name, (parameter, _) in whole.items())
    errors = {
        name: ((gradient - expected[name].grad).norm() / expected[name].grad.norm()).item()
        for name, (_, gradient) in whole.items()
    }
    return Outcome(loss, reference_loss, equal, errors)


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[Outcome]]:
    return {world_size: run_ranks(_compare, world_size)[0] for world_size in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "index"),
    [(size, i) for size, layouts in LAYOUTS.items() for i in range(len(layouts))],
    ids=[f"{size}ranks-{layout}" for size, layouts in LAYOUTS.items() for layout in layouts],
)
def test_layout_equals_plain_model(outcomes, world_size: int, index: int) -> None:
    outcome = outcomes[world_size][index]
    assert outcome.parameters_equal, "the starting parameters depend on the layout"
    assert outcome.loss == pytest.approx(outcome.reference_loss, rel=1e-6)
    name, error = max(outcome.gradient_errors.items(), key=lambda item: item[1])
    assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"
