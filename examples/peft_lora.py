"""PEFT: a rule gives the factors of LoRA to Muon, since the defaults leave them to AdamW.

python -m examples.peft_lora
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid, Rule


def train(folder: str, steps: int = 8, resume: bool = False) -> PeftModel:
    llama = get_peft_model(model(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    optimizer = Hybrid(llama, lr=2e-3, rules=[Rule(match="*lora_*", optimizer="muon")])
    first = 0
    if resume:
        state = torch.load(f"{folder}/state.pt")
        llama.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = 4
    for step, batch in enumerate(DataLoader(Tokens(), batch_size=2)):
        if first <= step < steps:
            llama(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:
            torch.save({"model": llama.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")
    return llama


if __name__ == "__main__":
    train("runs")
