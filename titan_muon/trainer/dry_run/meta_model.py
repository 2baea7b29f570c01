"""Builds a recipe's model, sharded as in training, on the meta device in a fake world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as device_utils

from titan_muon.assignment.groups import named_parameters_of
from titan_muon.forecast.fake_world import fake_world
from titan_muon.forecast.model import PlannedModel, plan_of
from titan_muon.trainer.assign.container import HybridOptimizers, parts_of_config
from titan_muon.trainer.device import planning_for, this_device
from titan_muon.trainer.dry_run.training import ModelSize
from titan_muon.trainer.model.pipeline import stage_ranks
from titan_muon.trainer.model.qk_clip import reduced_bytes
from titan_muon.trainer.recipe import Recipe, as_recipe_errors
from titan_muon.trainer.recipe.degrees import check_layout
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer import MuonTrainer
from titan_muon.trainer.run.trainer_config import trainer_config

MICROBATCHES = 8


@dataclass(frozen=True)
class MetaModel(PlannedModel):
    """A recipe's model, or a pipeline stage."""

    logit_bytes: int  # QK-clip's all-reduce per step
    size: ModelSize  # of the whole model


def smallest_world(recipe: Recipe) -> int:
    """Smallest world size for the recipe's degrees."""
    degrees = recipe.parallelism
    shard = max(degrees.data_parallel_shard_degree, 1)
    inner = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    if degrees.data_parallel_shard_degree == -1:
        # Expert parallelism divides the ranks of FSDP, CP and TP.
        while (shard * inner) % degrees.expert_parallel_degree:
            shard += 1
    return degrees.data_parallel_replicate_degree * shard * inner * degrees.pipeline_parallel_degree


def build_meta_model(recipe: Recipe, world_size: int, device: str | None = None, *, stage: int = 0) -> MetaModel:
    """The model of pipeline rank `stage`, with Muon's plan. `device`: type to plan for, by default this machine's.

    Raises RecipeError like training, except as `check_degrees` and `check_machine`.
    """
    check_layout(recipe, world_size)
    kind = this_device() if device is None else device
    ranks = stage_ranks(world_size, recipe.parallelism.pipeline_parallel_degree, stage)
    with as_recipe_errors(), planning_for(kind), fake_world(world_size, ranks[0]):
        config = trainer_config(recipe, Run(folder=recipe.dump_folder), world_size)
        parts, size = _sharded_parts(config, world_size)
        assert isinstance(config.optimizer, HybridOptimizers.Config), "the recipe builds this container"
        built = parts_of_config(config.optimizer, parts, config.optimizer.model)
        plan = plan_of(built.muon, kind)
        assert config.model_spec is not None, "the recipe names a model"
        sent = reduced_bytes(config.model_spec.model)
        return MetaModel(world_size, ranks, kind, named_parameters_of(parts), built, plan, sent, size)


def _sharded_parts(config: MuonTrainer.Config, world_size: int) -> tuple[list[nn.Module], ModelSize]:
    """Model parts of this process's stage, and the size of the whole model."""
    spec = config.model_spec
    assert spec is not None, "the recipe names a model"
    # In the order of TorchTitan's trainer.
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    spec.model.update_from_config(config=config)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), device_utils.set_default_dtype(dtype):
        model = spec.model.build()
    size = _model_size(spec.model, model, config.training.seq_len)
    options: dict[str, Any] = {
        "parallel_dims": parallel_dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": config.dump_folder,
    }
    if not parallel_dims.pp_enabled:
        sharded: Any = spec.parallelize_fn(model, **options)
        if getattr(sharded, "enable_weight_tying", False):
            # As in TorchTitan: under spmd_types, sharding splits a tied parameter into two.
            sharded.tok_embeddings.weight = sharded.lm_head.weight
        return [sharded], size
    assert spec.pipelining_fn is not None, "TorchTitan's decoders can be cut"
    # Enough microbatches for any schedule: the recipe's batch may not fit.
    calls = MICROBATCHES * parallel_dims.pp
    sequences = config.parallelism.pipeline_parallel_microbatch_size * calls
    options["training"] = replace(config.training, local_batch_size=sequences)
    _, parts, _, _ = spec.pipelining_fn(
        model,
        device=torch.device("meta"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=config.loss.build(compile_config=config.compile),
        **options,
    )
    return list(parts), size


def _model_size(config: Any, model: nn.Module, seq_len: int) -> ModelSize:
    _, flops = config.get_nparams_and_flops(model, seq_len)
    experts = next((layer.moe for layer in getattr(config, "layers", ()) if getattr(layer, "moe", None)), None)
    routed = 0.0 if experts is None else experts.router.top_k / experts.num_experts
    vocabularies = [len(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    return ModelSize(flops, max(vocabularies, default=0), routed)
