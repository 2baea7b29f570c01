"""A saved model as a folder of Hugging Face: weights, configuration and tokenizer.

TorchTitan's adapters name and shape the weights; the configuration is read off TorchTitan's.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor

from titan_muon.trainer.commands.saved_model import SavedModel
from titan_muon.trainer.data.tokenizers import BYTES, BPETokenizer, ByteTokenizer
from titan_muon.trainer.model.hugging_face import EXPERT_BIAS, hf_config
from titan_muon.trainer.recipe import RecipeError

MARKS = ("<|begin|>", "<|end|>")
"""Texts of the opening and the closing mark of `data.tokenizer` "bytes" and "bpe"."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


def save(saved: SavedModel, folder: Path, *, drop_expert_bias: bool) -> None:
    """Write the model, config.json and the tokenizer into a new folder.

    `drop_expert_bias`: leave out the bias of load balancing where Transformers' architecture has none.

    Raises RecipeError for a model without a counterpart in Transformers, and for weights that the counterpart lacks.
    """
    recipe, tokenizer = saved.recipe, saved.tokenizer
    config = hf_config(saved.spec.model, recipe.model.name)
    states: dict[str, Tensor] = {}
    assert saved.spec.state_dict_adapter is not None, "hf_config knows families with an adapter"
    adapter = saved.spec.state_dict_adapter(saved.spec.model, None)
    for name, tensor in saved.model.state_dict().items():
        converted = adapter.to_hf({name: tensor})
        # A view of a stack of experts would share the stack's memory, which safetensors refuses.
        states |= {key: part.detach().clone(memory_format=torch.contiguous_format) for key, part in converted.items()}
        tied = config["tie_word_embeddings"] and name == "lm_head.weight"
        dropped = drop_expert_bias and name.endswith(EXPERT_BIAS)
        if not (converted or tied or dropped) and tensor.any():
            remedy = (
                "; --drop-expert-bias exports without: some tokens get other experts" if EXPERT_BIAS in name else ""
            )
            raise RecipeError(f"{name} has no counterpart in {config['architectures'][0]}{remedy}")
    config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config["torch_dtype"] = str(next(saved.model.parameters()).dtype).removeprefix("torch.")
    folder.mkdir(parents=True)
    save_torch_state_dict(states, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        # safetensors writes files that only their owner can read.
        file.chmod((folder / "config.json").stat().st_mode)
    if recipe.data.tokenizer == "hf":
        for file in (file for names in TOKENIZER_FILES for file in Path(recipe.data.tokenizer_path or "").glob(names)):
            shutil.copy(file, folder)
        return
    fast_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": MARKS[0], "eos_token": MARKS[1]}
    about |= {"clean_up_tokenization_spaces": False, "model_max_length": recipe.training.seq_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of `data.tokenizer` "bytes" or "bpe", which opens every text."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(BYTES)}, [], byte_fallback=True))
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        assert isinstance(tokenizer, BPETokenizer), "other tokenizers are files"
        fast = Tokenizer.from_str(tokenizer.bpe.to_str())
        # A short text has fewer merges than ids.
        fast.add_tokens([f"<|unused {number}|>" for number in range(fast.get_vocab_size(), tokenizer.bos_id)])
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    opening = (MARKS[0], tokenizer.bos_id)
    fast.post_processor = processors.TemplateProcessing(single=f"{MARKS[0]} $A", special_tokens=[opening])
    return fast
