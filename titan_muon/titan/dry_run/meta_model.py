"""A recipe's model or a stage of it, as training shards it, in one process without data: on meta, in a fake world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as device_utils

from titan_muon.assignment.groups import ParamGroup, decided
from titan_muon.assignment.roles import see
from titan_muon.assignment.rules import Assignment
from titan_muon.options import MuonOptions
from titan_muon.orthogonalize import Dispatch, kernels_for
from titan_muon.plan import Plan
from titan_muon.planning import plan_step, planning_machine
from titan_muon.state.groups import iteration_of
from titan_muon.titan import compat
from titan_muon.titan.assign.container import HybridOptimizers
from titan_muon.titan.assign.explain import stage_ranks
from titan_muon.titan.device import planning_for
from titan_muon.titan.model.qk_clip import reduced_bytes
from titan_muon.titan.recipe import Recipe, recipe_error
from titan_muon.titan.recipe.degrees import check_layout
from titan_muon.titan.run.runs import Run
from titan_muon.titan.run.trainer import MuonTrainer
from titan_muon.titan.run.trainer_config import trainer_config

MICROBATCHES = 8
"""For each stage of a pipeline, in a schedule that is built and not run."""


@dataclass(frozen=True)
class MetaModel:
    """What training a recipe on `world_size` ranks would set up: the model, or one of its pipeline stages.

    Attributes:
        ranks: ranks that have this stage; all of them without pipeline parallelism.
        parameters: trained parameters by name, as the first of these ranks would hold them; it has the largest shards.
        assigned: the optimizer of each, in the same order.
        whole: the optimizer of each parameter of the whole model.
        groups: parameter groups by optimizer.
        plan: of the Muon step; None if Muon takes nothing.
        logit_bytes: what QK-clip, if the recipe asks for it, reduces over all ranks in a step.
    """

    world_size: int
    ranks: range
    parameters: dict[str, Tensor]
    assigned: tuple[Assignment, ...]
    whole: tuple[Assignment, ...]
    groups: Mapping[str, Sequence[ParamGroup]]
    plan: Plan | None
    logit_bytes: int


def smallest_world(recipe: Recipe) -> int:
    """The fewest ranks that the recipe's degrees fit on."""
    degrees = recipe.parallelism
    shard = max(degrees.data_parallel_shard_degree, 1)
    inner = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    if degrees.data_parallel_shard_degree == -1:
        # Expert parallelism has no ranks of its own: it divides those of FSDP, context and tensor parallelism.
        while (shard * inner) % degrees.expert_parallel_degree:
            shard += 1
    return degrees.data_parallel_replicate_degree * shard * inner * degrees.pipeline_parallel_degree


def this_device() -> str:
    """The type of device that this machine trains on."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def build_meta_model(recipe: Recipe, world_size: int, device: str | None = None, *, stage: int = 0) -> MetaModel:
    """The model of a recipe on `world_size` ranks, and Muon's plan for it. Needs no data, no GPU and no other process.

    `device` is the type of device that Newton-Schulz is planned for, by default this machine's. `stage` counts the
    pipeline's ranks, which may have several parts of the model each; each plans its step alone.

    Raises RecipeError for everything that building the run would raise it for, but for options that an optimizer
    registered by others does not take, which are known once it is built, and for a global batch that `world_size` ranks
    cannot share: of it a plan knows no more than how many passes it takes.
    """
    check_layout(recipe, world_size)
    stages = recipe.parallelism.pipeline_parallel_degree
    # The configuration of training itself, not one like it: what training would refuse is refused here too.
    config = trainer_config(recipe, Run(folder=recipe.dump_folder), world_size)
    ranks = stage_ranks(world_size, stages, stage)
    kind = this_device() if device is None else device
    # Owners are balanced by what Newton-Schulz costs on the device, so another kind's would be other owners.
    with _fake_world(world_size, ranks[0]), planning_for(kind):
        parts = _sharded_parts(config, world_size)
        parameters: dict[str, Tensor] = {
            canonical_fqn(name): p for part in parts for name, p in part.named_parameters() if p.requires_grad
        }
        optimizer = config.optimizer
        assert isinstance(optimizer, HybridOptimizers.Config), "the recipe builds this container"
        seen = see(parts, canonical_fqn) if optimizer.model is None else optimizer.model
        rules, defaults, tables = optimizer.rules, optimizer.defaults, optimizer.tables
        is_stage = optimizer.model is not None
        try:
            decision = decided(seen, parameters, rules, defaults, tables, offload=optimizer.offload, is_stage=is_stage)
        except ValueError as error:
            raise recipe_error(error) from error
        assigned = tuple(a for a in decision.whole if a.fqn in parameters)
        plan = _plan(parameters, decision.groups.get("muon", ()), decision.tables.get("muon", {}), kind)
        assert config.model_spec is not None, "the recipe names a model"
        sent = reduced_bytes(config.model_spec.model)
        return MetaModel(world_size, ranks, parameters, assigned, decision.whole, decision.groups, plan, sent)


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    # Meshes of any size are made without a peer: the fake backend answers for all ranks. This process is the first of
    # its stage, which holds the largest shard of everything that does not divide.
    assert not dist.is_initialized(), "a dry run is a process of its own"
    compat.forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded_parts(config: MuonTrainer.Config, world_size: int) -> list[nn.Module]:
    """The model, or its parts in this process's pipeline stage."""
    spec = config.model_spec
    assert spec is not None, "the recipe names a model"
    # What TorchTitan's trainer does before it allocates anything, in its order: parameters take their dtype when they
    # are made, and the model must know the degrees by then.
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    spec.model.update_from_config(config=config)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), device_utils.set_default_dtype(dtype):
        model = spec.model.build()
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
            # As TorchTitan does before it fills parameters: under spmd_types, sharding makes two of a tied one.
            sharded.tok_embeddings.weight = sharded.lm_head.weight
        return [sharded]
    assert spec.pipelining_fn is not None, "TorchTitan's decoders can be cut"
    # As many microbatches as any schedule asks for: no plan depends on this batch, and the recipe's may not suit.
    size = config.parallelism.pipeline_parallel_microbatch_size * MICROBATCHES * parallel_dims.pp
    options["training"] = replace(config.training, local_batch_size=size)
    _, parts, _, _ = spec.pipelining_fn(
        model,
        device=torch.device("meta"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=config.loss.build(compile_config=config.compile),
        **options,
    )
    return list(parts)


def _plan(
    parameters: dict[str, Tensor], groups: Sequence[ParamGroup], table: Mapping[str, Any], device: str
) -> Plan | None:
    named = [(name, parameters[name]) for group in groups for name in group.names]
    if not named:
        return None
    try:
        options = MuonOptions(**table)
        # A plan knows parameters and not their groups, which may differ in steps and coefficients.
        iterations = [iteration_of(group.options) for group in groups for _ in group.names]
        kernels = kernels_for(options.ns_kernel, torch.device(device))
        dispatch = Dispatch.of(options, device, kernels, planning_machine(options.machine, device))
        return plan_step(named, iterations, dispatch, options)
    except ValueError as error:
        raise recipe_error(error) from error
