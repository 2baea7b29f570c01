"""A Llama that Megatron-FSDP shards (ZeRO-3), trained by Muon and AdamW, saved by torch.distributed.checkpoint.

torchrun --nproc_per_node=8 -m examples.megatron_fsdp
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_fsdp import fully_shard_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid, follow_megatron_fsdp


def train(folder: str, steps: int = 8, device: str = "cuda", calculate_per_token_loss: bool = False) -> Hybrid:
    llama, mesh = model().to(device), init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    axes = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device(device)}
    options = {"fsdp_unit_modules": [LlamaDecoderLayer], "calculate_per_token_loss": calculate_per_token_loss}
    sharded = fully_shard_model(llama, **axes, **options, zero_dp_strategy=3)
    optimizer = Hybrid(sharded, lr=2e-3)
    follow_megatron_fsdp(optimizer, sharded)
    for _, batch in zip(range(steps), DataLoader(Tokens(), batch_size=2), strict=False):
        sharded(**{name: tokens.to(device) for name, tokens in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = optimizer.param_groups
    weights = {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
    dcp.save({"model": weights, "optimizer": get_optimizer_state_dict(llama, optimizer)}, checkpoint_id=folder)
    return optimizer


if __name__ == "__main__":
    dist.init_process_group("nccl")
    train("runs/megatron_fsdp")
    dist.destroy_process_group()
