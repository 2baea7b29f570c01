"""Plain PyTorch under DistributedDataParallel, saved by torch.distributed.checkpoint.

torchrun --nproc_per_node=2 -m examples.ddp
"""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid, clip_grad_norm_


def train(folder: str, steps: int = 8, resume: bool = False) -> nn.Module:
    llama = model()
    wrapped = DistributedDataParallel(llama)
    optimizer = Hybrid(wrapped, lr=2e-3)
    if resume:
        weights, state = get_state_dict(llama, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/state")
        set_state_dict(llama, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step, batch in enumerate(DataLoader(Tokens(), batch_size=2)):
        if (4 if resume else 0) <= step < steps:
            wrapped(**batch).loss.backward()
            clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step == 3 and not resume:
            weights, state = get_state_dict(llama, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/state")
    return llama


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train("runs/ddp")
    dist.destroy_process_group()
