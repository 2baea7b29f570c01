"""Loss of a run's checkpoint on the held-out text of its recipe, on one process, whatever layout trained the run.

titan-muon evaluate runs/qwen_moe_muon
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from titan_muon.trainer.commands.saved_model import SavedModel


class HeldOutLoss(NamedTuple):
    """Mean cross entropy in nats over held-out text."""

    loss: float
    tokens: int  # predicted ones
    available: int  # sequences of the whole held-out text


def held_out_loss(saved: SavedModel, sequences: int) -> HeldOutLoss:
    """Loss of the first `sequences` of the held-out text, -1 for all, with a progress line on a terminal."""
    import torch.nn.functional as F
    from tqdm import tqdm

    from titan_muon.trainer.data.loader import NOT_COUNTED, PackedDataLoader

    assert isinstance(saved.held_out, PackedDataLoader.Config), "open_saved reads packed text only"
    training = saved.recipe.training
    config = replace(saved.held_out, sequences=sequences)
    tokenizer: Any = saved.tokenizer
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        local_batch_size=max(training.local_batch_size, 1),
    )
    total, count = 0.0, 0
    # None: only on a terminal.
    for inputs, labels in tqdm(loader, total=loader.batches, unit="batch", leave=False, disable=None):
        logits = saved.logits(inputs["input"], inputs["positions"])
        flat = labels.flatten().to(saved.device)
        total += float(F.cross_entropy(logits.flatten(0, -2), flat, ignore_index=NOT_COUNTED, reduction="sum"))
        count += int((flat != NOT_COUNTED).sum())
    return HeldOutLoss(total / count, count, loader.available)


def evaluate(
    run: tyro.conf.Positional[Path], step: int | None = None, sequences: int = 256, files: tuple[str, ...] = ()
) -> None:
    """Print the loss of a run's model on the held-out text.

    Args:
        run: Run folder, or folder of a recipe's runs, for the newest run.
        step: Step of the checkpoint; the newest by default.
        sequences: Sequences to read from the begin of the held-out text; -1 reads all, which can take minutes.
        files: Folders and glob patterns of the run's text, if it is not where data.files says.
    """
    if sequences == 0 or sequences < -1:
        raise RecipeError(f"--sequences {sequences}: must be -1, or 1 or more")
    folder = RunFolder.find(run).path
    # PyTorch takes seconds to import, which an error need not wait for.
    from titan_muon.trainer.commands.saved_model import open_saved
    from titan_muon.trainer.data.loader import bytes_per_token

    saved = open_saved(folder, step, files=files)
    if saved.held_out is None:
        raise RecipeError(
            f"{folder}: its recipe holds no text out; it needs validator.enable = true, data.validation_fraction above "
            '0 and a data.source other than "hf"'
        )
    try:
        loss, count, available = held_out_loss(saved, sequences)
    except RecipeError as error:
        where = "; name the run's text by --files" if error.key == "data.files" else ""
        raise RecipeError(f"{error}{where}") from error
    per_token = bytes_per_token(
        replace(saved.held_out, sequences=sequences),
        saved.tokenizer,
        saved.recipe.training.seq_len,
    )
    bits = "" if per_token is None else f", {loss / math.log(2) / per_token:.4f} bits per byte"
    part = (
        f" of {sequences:,} of {available:,} sequences; --sequences -1 reads all" if 0 < sequences < available else ""
    )
    print(f"step {saved.step}: held-out loss {loss:.4f} nats per token{bits}, {count:,} tokens{part}")
