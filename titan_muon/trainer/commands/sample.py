"""Write text from a run's checkpoint, on one process, whatever layout trained the run.

titan-muon sample runs/qwen_moe_muon --prompt "The owner" --tokens 200
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from titan_muon.trainer.commands.saved_model import SavedModel


def generate(saved: SavedModel, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The prompt and up to `tokens` sampled tokens as text; ends early with the mark of a document's end."""
    import torch

    tokenizer = saved.tokenizer
    ids: list[int] = tokenizer.encode(prompt, add_bos=True, add_eos=False)
    ids = ids or [tokenizer.eos_id]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        # The model has learned positions below seq_len only.
        window = torch.tensor([ids[-saved.recipe.training.seq_len :]])
        positions = torch.arange(window.shape[1]).unsqueeze(0)
        logits = saved.logits(window, positions).flatten(0, -2)
        logits = logits[-1, : tokenizer.get_vocab_size()].cpu()
        if top_k > 0:
            least = logits.topk(min(top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        if token == tokenizer.eos_id:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def sample(
    run: tyro.conf.Positional[Path],
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    step: int | None = None,
) -> None:
    """Print a prompt and its continuation by the model of a run.

    Args:
        run: Run folder, or folder of a recipe's runs, for the newest run.
        prompt: Beginning of the text.
        tokens: Most tokens to write.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0 draws from all.
        seed: Seed of the draws.
        step: Step of the checkpoint; the newest by default.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise RecipeError(f"--temperature {temperature}: must be a number of 0 or more")
    for flag, value, least in (("--top-k", top_k, 0), ("--tokens", tokens, 1)):
        if value < least:
            raise RecipeError(f"{flag} {value}: must be {least} or more")
    folder = RunFolder.find(run).path
    # PyTorch takes seconds to import, which an error need not wait for.
    from titan_muon.trainer.commands.saved_model import open_saved

    print(generate(open_saved(folder, step), prompt, tokens, temperature, top_k, seed))
