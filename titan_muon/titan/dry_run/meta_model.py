"""A recipe's model, sharded as in training, in one process without data: on the meta device, in a fake world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as device_utils

from titan_muon.build import iteration_of, plan_step
from titan_muon.options import MuonOptions
from titan_muon.orthogonalize import Dispatch, kernels_for
from titan_muon.plan import Plan
from titan_muon.titan.optimizers import HybridOptimizers, ParamGroup, assignments, grouped
from titan_muon.titan.recipe import Recipe, recipe_error
from titan_muon.titan.recipe.degrees import check_layout
from titan_muon.titan.rules import Assignment
from titan_muon.titan.run.runs import Run
from titan_muon.titan.run.trainer import MuonTrainer
from titan_muon.titan.run.trainer_config import trainer_config


@dataclass(frozen=True)
class MetaModel:
    """What training a recipe on `world_size` ranks would set up.

    Attributes:
        parameters: trained parameters by name, as rank 0 would hold them; it holds the largest shards.
        assigned: the optimizer of each, in the same order.
        groups: parameter groups by optimizer.
        plan: of the Muon step; None if Muon takes nothing.
    """

    world_size: int
    parameters: dict[str, Tensor]
    assigned: tuple[Assignment, ...]
    groups: dict[str, list[ParamGroup]]
    plan: Plan | None


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


def build_meta_model(recipe: Recipe, world_size: int, device: str | None = None) -> MetaModel:
    """The model of a recipe on `world_size` ranks, and Muon's plan for it. Needs no data, no GPU and no other process.

    `device` is the type of device that Newton-Schulz is planned for, by default this machine's.

    Raises RecipeError for everything that building the run would raise it for, but for options that an optimizer
    registered by others does not take, which are known once it is built, and for a global batch that `world_size` ranks
    cannot share: no plan depends on it.
    """
    check_layout(recipe, world_size)
    # The configuration of training itself, not one like it: what training would refuse is refused here too.
    config = trainer_config(recipe, Run(folder=recipe.dump_folder), world_size)
    with _fake_world(world_size):
        model = _sharded_model(config, world_size)
        parameters: dict[str, Tensor] = {
            canonical_fqn(name): p for name, p in model.named_parameters() if p.requires_grad
        }
        optimizer = config.optimizer
        assert isinstance(optimizer, HybridOptimizers.Config), "the recipe builds this container"
        assigned = assignments(optimizer, {name: tuple(p.shape) for name, p in parameters.items()})
        groups = grouped(optimizer, assigned)
        plan = _plan(parameters, groups.get("muon", []), optimizer, this_device() if device is None else device)
        return MetaModel(world_size, parameters, assigned, groups, plan)


@contextmanager
def _fake_world(world_size: int) -> Iterator[None]:
    # Meshes of any size are made without a peer: the fake backend answers for all ranks, and this process is rank 0,
    # which holds the largest shard of everything that does not divide.
    assert not dist.is_initialized(), "a dry run is a process of its own"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded_model(config: MuonTrainer.Config, world_size: int) -> nn.Module:
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
    return spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )


def _plan(
    parameters: dict[str, Tensor], groups: list[ParamGroup], config: HybridOptimizers.Config, device: str
) -> Plan | None:
    named = [(name, parameters[name]) for group in groups for name in group.names]
    if not named:
        return None
    try:
        options = MuonOptions(**config.tables["muon"])
        # A plan knows parameters and not their groups, which may differ in steps and coefficients.
        iterations = [iteration_of(group.options) for group in groups for _ in group.names]
        kernels = kernels_for(options.ns_kernel, torch.device(device))
        return plan_step(named, iterations, Dispatch.of(options, device, kernels), options)
    except ValueError as error:
        raise recipe_error(error) from error
