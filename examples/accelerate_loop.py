"""Accelerate: one process, DDP, or FSDP2, by `accelerate config`. `prepare` may shard the model after Hybrid was made.

accelerate launch -m examples.accelerate_loop
"""

from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid


def train(folder: str, steps: int = 8, resume: bool = False) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    llama = model()
    llama, optimizer, loader = accelerator.prepare(llama, Hybrid(llama, lr=2e-3), DataLoader(Tokens(), batch_size=2))
    if resume:
        accelerator.load_state(f"{folder}/state")
    for step, batch in enumerate(loader):
        if step >= steps:
            break
        if resume and step < 4:
            continue
        accelerator.backward(llama(**batch).loss)
        accelerator.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            accelerator.save_state(f"{folder}/state")
    return accelerator.unwrap_model(llama)


if __name__ == "__main__":
    train("runs/accelerate")
