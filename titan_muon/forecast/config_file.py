"""`titan-muon plan config.json`: the plan of a Hugging Face model under FSDP2, from its configuration alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..assignment.groups import assign, named_parameters_of
from ..options import Machine
from ..owned import Owners, own
from ..owned.private import flat_mesh
from .preview import Preview, preview


def plan_config(
    path: str, world_size: int, machine: str = "auto", *, replicas: int = 1, owned: bool = False, dtype: str = "float32"
) -> Preview:
    """The plan of the model of a `config.json`, or of its folder, with `fully_shard` of each layer and of the rest.

    Args:
        machine: name as in `options.Machine`.
        replicas: replicas of HSDP.
        owned: store each Muon matrix of the layers whole on one rank of all replicas, by `own`.
        dtype: of the parameters between steps.

    Raises ValueError as `preview`, for a configuration that Transformers cannot read, and for a world that `replicas`
    does not divide.
    """
    if replicas < 1 or world_size % replicas:
        raise ValueError(f"--replicas {replicas} does not divide --world-size {world_size}; choose a divisor")
    import transformers

    if not Path(path).exists():
        raise ValueError(f"{path}: no such file; name the config.json of a model, or its folder")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: Transformers {transformers.__version__} cannot read it: {error}") from error
    names = config.architectures or []
    known = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)

    def build() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_config(config) if known is None else known(config)
        return model.to(getattr(torch, dtype))

    def parallelize(model: nn.Module) -> None:
        world, layers = dist.get_world_size(), list(_layers(model))
        shape, axes = (replicas, world // replicas), ("replicate", "shard")
        first = 0 if replicas > 1 else 1
        mesh = init_device_mesh("cuda", shape[first:], mesh_dim_names=axes[first:])
        owners = None
        if owned:
            inside = {parameter for layer in layers for parameter in layer.parameters()}
            named = named_parameters_of([model])
            muon = [a for a in assign(model) if a.optimizer == "muon" and named[a.fqn] in inside]
            matrices = [a for a in muon if len(a.shape) == 2]
            splits = [a.split for a in matrices if a.split is not None]
            joint = flat_mesh(mesh) if replicas > 1 else mesh
            owners = Owners(model, mesh=joint, params=[named[a.fqn] for a in matrices], split=splits)
        for layer in layers:
            is_owned = owners is not None and bool(owners.within(layer))
            fully_shard(layer, mesh=mesh, ignored_params=own(layer, owners=owners) if is_owned else None)
        fully_shard(model, mesh=mesh)

    return preview(build, parallelize, world_size, machine)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield from child
        else:
            yield from _layers(child)


def main(words: Sequence[str]) -> int:
    """Print the plan of a command line. Returns the exit code, 2 for a refused plan."""
    parser = argparse.ArgumentParser(prog="titan-muon plan", description=plan_config.__doc__)
    parser.add_argument("config", help="config.json of a Hugging Face model, or its folder")
    parser.add_argument("--world-size", type=int, required=True, help="number of GPUs")
    machines = get_args(get_type_hints(Machine)["name"])
    parser.add_argument("--machine", default="auto", choices=machines, help="machine to plan for")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of HSDP")
    parser.add_argument("--owned", action="store_true", help="store each matrix of the layers whole on one rank")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the parameters")
    parser.add_argument("--full", action="store_true", help="a line for each parameter and each owner")
    options = vars(parser.parse_args(words))
    full, path = options.pop("full"), options.pop("config")
    try:
        print(plan_config(path, **options).text(full=full))
    except ValueError as error:
        print(f"titan-muon plan: {error}", file=sys.stderr)
        return 2
    return 0
