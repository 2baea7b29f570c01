"""A Llama of two layers and a stream of random tokens, so that the examples need no download."""

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def model() -> LlamaForCausalLM:
    """A causal language model with 21 parameters, 14 of which are hidden matrices."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32))


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token."""
    words = Tokenizer(models.WordLevel({str(token): token for token in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 16 tokens; each is the same in every run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}
