"""Loss of a run's checkpoint on the held-out text of its recipe, on one process, whatever layout trained the run.

titan-muon evaluate runs/qwen_moe_muon
"""

import math
from dataclasses import replace
from pathlib import Path

import tyro

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import RunFolder


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
    import torch.nn.functional as F
    from tqdm import tqdm

    from titan_muon.trainer.commands.saved_model import open_saved
    from titan_muon.trainer.data.loader import NOT_COUNTED, bytes_per_token

    saved = open_saved(folder, step, files=files)
    if saved.held_out is None:
        raise RecipeError(
            f"{folder}: its recipe holds no text out; it needs validator.enable = true, data.validation_fraction above "
            '0 and a data.source other than "hf"'
        )
    length, at_once = saved.recipe.training.seq_len, max(saved.recipe.training.local_batch_size, 1)
    config = replace(saved.held_out, sequences=sequences)
    try:
        loader = config.build(
            dp_world_size=1, dp_rank=0, tokenizer=saved.tokenizer, seq_len=length, local_batch_size=at_once
        )
    except RecipeError as error:
        where = "; name the run's text by --files" if error.key == "data.files" else ""
        raise RecipeError(f"{error}{where}") from error
    total, count = 0.0, 0
    # None: only on a terminal.
    for inputs, labels in tqdm(loader, total=loader.batches, unit="batch", leave=False, disable=None):
        logits = saved.logits(inputs["input"], inputs["positions"])
        flat = labels.flatten().to(saved.device)
        total += float(F.cross_entropy(logits.flatten(0, -2), flat, ignore_index=NOT_COUNTED, reduction="sum"))
        count += int((flat != NOT_COUNTED).sum())
    per_token = bytes_per_token(config, saved.tokenizer, length)
    bits = "" if per_token is None else f", {total / count / math.log(2) / per_token:.4f} bits per byte"
    part = f" of {sequences:,} of {loader.available:,} sequences; --sequences -1 reads all"
    part = part if 0 < sequences < loader.available else ""
    print(f"step {saved.step}: held-out loss {total / count:.4f} nats per token{bits}, {count:,} tokens{part}")
