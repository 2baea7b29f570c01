"""Schedules of timm, Transformers and PyTorch after each other; the embedding is frozen under the second.

python -m examples.schedules
"""

import torch
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from transformers import get_polynomial_decay_schedule_with_warmup

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid

SCHEDULES = (
    lambda optimizer: CosineLRScheduler(optimizer, t_initial=4, warmup_t=1),
    lambda optimizer: get_polynomial_decay_schedule_with_warmup(optimizer, 0, 4),
    lambda optimizer: OneCycleLR(optimizer, max_lr=2e-3, total_steps=4, cycle_momentum=False),
)


def train(folder: str, resume: bool = False) -> nn.Module:
    llama = model()
    optimizer = Hybrid(llama, lr=2e-3)
    for group in optimizer.param_groups:
        group["lr_scale"] = 0.9  # timm's layer decay
    for step, batch in zip(range(12), DataLoader(Tokens(), batch_size=2), strict=False):
        phase, place = divmod(step, 4)
        if place == 0:
            llama.model.embed_tokens.requires_grad_(phase != 1)
            optimizer.rebuild()
            schedule = SCHEDULES[phase](optimizer)
        parts = (llama, optimizer, schedule)
        if step == 6 and not resume:
            torch.save([part.state_dict() for part in parts], f"{folder}/state.pt")
        if step == 6 and resume:
            for part, state in zip(parts, torch.load(f"{folder}/state.pt"), strict=True):
                part.load_state_dict(state)
        if step >= 6 or not resume:
            llama(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(*[place + 1][phase:])  # timm's takes the step
    return llama


if __name__ == "__main__":
    train(".")
