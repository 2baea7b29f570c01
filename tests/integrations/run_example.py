"""Runs an example on a rank and writes the final weights: `python -m tests.integrations.run_example NAME DIR OUT`."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from titan_muon.owned import gather, is_owned


def allow_fsdp_on_cpus() -> None:
    """Accelerate enables FSDP for GPUs only; add CPUs to the list of devices."""
    from accelerate import state

    source = state.DistributedType
    original = state.AcceleratorState.__init__

    def patched(self: object, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == source.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = source.FSDP, plugin
            state.PartialState._shared_state["distributed_type"] = source.FSDP
            if self._mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self._mixed_precision)

    state.AcceleratorState.__init__ = patched


def without_torchvision() -> None:
    """Let timm's schedulers be imported without its models, which need torchvision."""
    if found := importlib.util.find_spec("timm"):
        sys.modules["timm"] = importlib.util.module_from_spec(found)


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter with the shards of all ranks."""
    if isinstance(parameter, DTensor) and is_owned(parameter):
        return gather(parameter).detach().clone()
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--group", action="store_true", help="make the default process group, as the script would")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    allow_fsdp_on_cpus()
    without_torchvision()
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    if args.group:
        dist.init_process_group("gloo")
    before: dict[Tensor, Tensor] = {}

    def keep(optimizer: Optimizer, *arguments: object) -> None:
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before.update({param: whole(param) for param in params if param not in before})

    register_optimizer_step_pre_hook(keep)
    model = importlib.import_module(f"examples.{args.name}").train(args.folder, resume=args.resume, **args.options)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    still = [name for name, p in trained.items() if p not in before or torch.equal(before[p], weights[name])]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"weights": weights, "still": still, "trained": len(trained)}, args.out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
