"""PEFT in one process or under DDP: a rule gives the factors of LoRA to Muon, since the defaults leave them to AdamW.

python -m examples.peft_lora
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid, Rule


def train(folder: str, steps: int = 8, resume: bool = False) -> PeftModel:
    llama = get_peft_model(model(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped = DistributedDataParallel(llama) if dist.is_initialized() else llama
    optimizer = Hybrid(wrapped, lr=2e-3, rules=[Rule(match="*lora_*", optimizer="muon")])
    if resume:
        state = torch.load(f"{folder}/state.pt")
        llama.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step, batch in enumerate(DataLoader(Tokens(), batch_size=2)):
        if (4 if resume else 0) <= step < steps:
            wrapped(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # Under DDP rank 0 saves alone.
        if step == 3 and not resume and (not dist.is_initialized() or dist.get_rank() == 0):
            torch.save({"model": llama.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")
    return llama


if __name__ == "__main__":
    train("runs")
