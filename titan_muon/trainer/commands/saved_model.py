"""A model from a run's checkpoint, on one process, whatever layout saved the checkpoint."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model_spec import ModelSpec

from titan_muon.trainer.device import passes_dtype
from titan_muon.trainer.model.attention import share_dense_mask
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.files import import_modules
from titan_muon.trainer.recipe.sections import Placement
from titan_muon.trainer.recipe.torchtitan_sections import Parallelism
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config
from titan_muon.trainer.run_folder import TOKENIZER, RunFolder
from titan_muon.trainer.storage.reader import SafePlanner, SafeReader
from titan_muon.trainer.torchtitan import compat


@dataclass(frozen=True)
class SavedModel:
    """A model with the weights of a checkpoint, in evaluation mode, and the tokenizer and held-out text of the run."""

    step: int
    recipe: Recipe
    spec: ModelSpec
    model: nn.Module
    device: torch.device
    tokenizer: BaseTokenizer
    held_out: Any

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Scores of the next token, shape (*batch, vocabulary), for int64 ids and positions, each (sequences, seq_len).

        A position of 0 begins a document; attention does not cross documents.
        """
        ids, positions = ids.to(self.device), positions.to(self.device)
        masks = self.model.get_attention_masks(positions=positions)  # type: ignore[operator]
        logits: Tensor = self.model(ids, positions=positions, attention_masks=masks)
        return logits.float()


def open_saved(
    run: Path, step: int | None = None, *, dtype: str | None = None, files: tuple[str, ...] = ()
) -> SavedModel:
    """The model of a run folder, of the newest complete checkpoint or of `step`.

    `dtype`: of the parameters; None: of the passes in training. `files`: in place of the recipe's `data.files`.

    Imports the recipe's modules. Raises RecipeError for a missing module or checkpoint, and a step that was not saved.
    """
    folder = RunFolder(run)
    recipe = folder.recipe_to_read
    import_modules(recipe)
    step, checkpoint = folder.checkpoint(step)
    if recipe.data.tokenizer == "bpe" and folder.tokenizer is None:
        warnings.warn(f"{run} has no {TOKENIZER}: it is trained again from data.files of today", stacklevel=2)
    if files:
        recipe = replace(recipe, data=replace(recipe.data, source="files", files=files))
    # A process alone holds every parameter whole.
    single = replace(recipe, parallelism=Parallelism(), placement=Placement())
    config: Any = trainer_config(single, Run(folder=str(run)), 1)
    device = torch.device("cpu" if compat.install() else "cuda")
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device=device)
    with torch.no_grad():
        # Buffers, for example of the rotary embedding, are not saved.
        model.init_weights(buffer_device=None)
    share_dense_mask(model)
    _read_weights(model, checkpoint)
    for parameter in model.parameters():
        # As FSDP's mixed precision in training, which casts no buffer.
        passes = passes_dtype(recipe.training.mixed_precision_param, device.type)
        parameter.data = parameter.data.to(TORCH_DTYPE_MAP[dtype or passes])
    enabled = recipe.data.validation_fraction > 0 and recipe.data.source != "hf"
    held_out = config.validator.dataloader if enabled and recipe.validator.enable else None
    return SavedModel(step, single, spec, model.eval(), device, config.tokenizer.build(tokenizer_path=""), held_out)


def _read_weights(model: nn.Module, checkpoint: Path) -> None:
    states = {canonical_fqn(name): tensor for name, tensor in model.state_dict().items()}
    saved = SafeReader(checkpoint).read_metadata().state_dict_metadata
    for name, tensor in states.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
            raise RecipeError(f"{checkpoint}: {name} of shape {tuple(tensor.shape)} is not in the checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(states, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=True)
