"""FSDP2 with owned matrices: the Muon step needs no communication. `mesh` as in the rest of your script.

torchrun --nproc_per_node=2 -m examples.fsdp2
"""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid, Owners, clip_grad_norm_, head_splits, own


def shard(llama: nn.Module, owned: bool) -> None:
    mesh, layers = init_device_mesh("cpu", (dist.get_world_size(),)), llama.model.layers
    owners = Owners(llama, mesh=mesh, params=[p for p in layers.parameters() if p.ndim == 2]) if owned else None
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=own(layer, owners=owners) if owned else None)
    fully_shard(llama, mesh=mesh)


def train(folder: str, steps: int = 8, resume: bool = False, owned: bool = True) -> nn.Module:
    llama = model()
    shard(llama, owned)
    optimizer = Hybrid(llama, lr=2e-3, muon={} if owned else {"split": head_splits(llama)})
    if resume:
        weights, state = get_state_dict(llama, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/state")
        set_state_dict(llama, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step, batch in enumerate(DataLoader(Tokens(), batch_size=2)):
        if (4 if resume else 0) <= step < steps:
            llama(**batch).loss.backward()
            clip_grad_norm_(llama.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step == 3 and not resume:
            weights, state = get_state_dict(llama, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/state")
    return llama


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("runs/fsdp2")
    dist.destroy_process_group()
