"""Write a run's model as a Hugging Face folder: weights, configuration and tokenizer, whatever layout trained the run.

titan-muon export runs/llama_muon exported
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import RunFolder


def export(
    run: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    step: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    drop_expert_bias: bool = False,
) -> None:
    """Write the model of a run as a folder that Transformers loads.

    Args:
        run: Run folder, or folder of a recipe's runs, for the newest run.
        out: New folder.
        step: Step of the checkpoint; the newest by default.
        dtype: Dtype of the weights.
        drop_expert_bias: Leave out the bias of load balancing where Transformers' architecture has none.
    """
    folder = RunFolder.find(run).path
    if out.exists():
        raise RecipeError(f"{out} exists; name a new folder")
    # PyTorch takes seconds to import, which an error need not wait for.
    from titan_muon.trainer.commands.hugging_face import save
    from titan_muon.trainer.commands.saved_model import open_saved

    saved = open_saved(folder, step, dtype=dtype)
    save(saved, out, drop_expert_bias=drop_expert_bias)
    print(f"step {saved.step} of {folder} is in {out}")
