"""Tokenizers for TorchTitan's trainer. Two marks enclose a document."""

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titan_muon.trainer.data.cache import cached, digest
from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.sections import Data

logger = logging.getLogger(__name__)

BYTES = 256
MARKS = 2
WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""The words of `pre_tokenizers.ByteLevel` in a text of ASCII."""


class _MarkedTokenizer(BaseTokenizer):
    """Ids 0 to `vocab_size - 3` are text; the last two are the opening and the closing mark."""

    fingerprint: str

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.bos_id = vocab_size - 2
        self.eos_id: int = vocab_size - 1

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Ids of the text, with the requested marks. A lone surrogate becomes "?"."""
        ids = self._encode([text.encode("utf-8", errors="replace").decode()])[0].tolist()
        return [self.bos_id] * add_bos + ids + [self.eos_id] * add_eos

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int64 ids of each text, between both marks."""
        return [np.concatenate([[self.bos_id], ids, [self.eos_id]]) for ids in self._encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids, without marks; invalid UTF-8 becomes U+FFFD."""
        return self._decode([i for i in ids if i < self.bos_id])

    def get_vocab_size(self) -> int:
        return self._vocab_size


class ByteTokenizer(_MarkedTokenizer):
    """A token per byte of UTF-8: 258 ids with the marks."""

    fingerprint = "bytes"

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        super().__init__(BYTES + MARKS)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class BPETokenizer(_MarkedTokenizer):
    """Byte-pair encoding (Sennrich et al., 2016) on bytes (Radford et al., 2019), trained on the recipe's text.

    The marks are outside the trained model, so no text can contain them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """`documents`: training text, and a `[data]` table with `vocab_size` and `cache`. `saved`: text of the
        tokenizer of a run, which is then not trained again."""

        documents: Documents
        saved: str | None = None

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        data = config.documents.data
        super().__init__(data.vocab_size)
        text = config.saved
        if text is None:
            # Merges from held-out text would lower the validation loss.
            key = digest(config.documents.digest, repr(data.validation_fraction), str(data.vocab_size))
            rows = _train_bpe(config.documents, data.vocab_size)
            table = cached(data.cache, f"bpe-{key}", rows, {"tokenizer": "string"})
            text = table["tokenizer"][0].as_py()
        self.bpe = Tokenizer.from_str(text)
        self.text = self.bpe.to_str()
        self.fingerprint = digest("bpe", self.text, str(data.vocab_size))

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Words repeat, and have the same ids alone. Looking them up takes a third of the tokenizer's time.
        split = [WORDS.findall(text) if text.isascii() else [text] for text in texts]
        words = list(dict.fromkeys(chain.from_iterable(split)))
        ids = dict(zip(words, (encoding.ids for encoding in self.bpe.encode_batch_fast(words)), strict=True))
        return [np.fromiter(chain.from_iterable(map(ids.__getitem__, parts)), np.int64) for parts in split]

    def _decode(self, ids: list[int]) -> str:
        return self.bpe.decode(ids)


def check_tokenizer_folder(path: str | None) -> str:
    """Raise RecipeError for a folder without a tokenizer. Returns the key and its value, for messages."""
    folder = f"data.tokenizer_path = {path!r}"
    if path is None or not Path(path, "tokenizer.json").is_file():
        raise RecipeError(f"{folder} has no tokenizer.json")
    return folder


def check_vocabulary(tokens: int, rows: int) -> None:
    """Raise RecipeError for more tokens than rows of the embedding."""
    # An id beyond the embedding would be a late, nameless index error of the device.
    if tokens > rows:
        raise RecipeError(
            f"has {tokens} tokens and the model embeds {rows}; set model.vocab_size = {tokens}", key="data.tokenizer"
        )


class PretrainedTokenizer(HuggingFaceTokenizer):
    """TorchTitan's Hugging Face tokenizer on the folder `path` with `tokenizer.json`."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        path: str

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        folder = check_tokenizer_folder(config.path)
        super().__init__(tokenizer_path=config.path)
        if self.bos_id is None and self.eos_id is None:
            neither = "tokenizer_config.json names neither bos_token nor eos_token"
            raise RecipeError(f"{folder}: {neither}, so documents cannot be marked")
        self.fingerprint = digest("hf", self.tokenizer.to_str(), str(self.bos_id), str(self.eos_id))

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int64 ids of each text between both marks; a tokenizer with a single mark uses it at both ends."""
        before = [self.eos_id] if self.bos_id is None else [self.bos_id] * (not self.hf_adds_bos)
        after = [self.bos_id] if self.eos_id is None else [self.eos_id] * (not self.hf_adds_eos)
        encoded = self.tokenizer.encode_batch_fast(texts)
        return [np.array([*before, *encoding.ids, *after], np.int64) for encoding in encoded]

    def get_vocab_size(self) -> int:
        """One more than the largest id: a vocabulary may have gaps."""
        return max(self.get_vocab().values()) + 1


DocumentTokenizer = ByteTokenizer | BPETokenizer | PretrainedTokenizer
"""Tokenizers of a corpus. Equal `fingerprint`s: equal ids of any text."""


def tokenizer_config(data: Data, saved: str | None = None) -> BaseTokenizer.Config:
    """TorchTitan's tokenizer configuration. Reads no file. `saved`: text of the tokenizer that a run trained."""
    if data.tokenizer == "bytes":
        return ByteTokenizer.Config()
    if data.tokenizer == "bpe":
        return BPETokenizer.Config(documents=Documents(data), saved=saved)
    assert data.tokenizer_path is not None, "a recipe with tokenizer hf and no path is refused"
    return PretrainedTokenizer.Config(path=data.tokenizer_path)


def vocab_size(data: Data) -> int | None:
    """Vocabulary with marks; None for `hf`, where the model's vocabulary counts."""
    return {"bytes": BYTES + MARKS, "bpe": data.vocab_size, "hf": None}[data.tokenizer]


def _train_bpe(documents: Documents, vocab_size: int) -> Iterator[dict[str, str]]:
    logger.info("Training a BPE tokenizer of %d tokens on %d documents", vocab_size, len(documents.training))
    began = time.monotonic()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # The alphabet has every byte, so every text can be encoded.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - MARKS, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(documents.training_texts(), trainer)
    logger.info("Trained in %.1f s, cached in %s", time.monotonic() - began, documents.data.cache)
    learned = bpe.get_vocab_size() + MARKS
    if learned < vocab_size:
        message = "data.vocab_size = %d: the text has only %d distinct tokens to learn; the other ids stay unused"
        logger.warning(message, vocab_size, learned)
    yield {"tokenizer": bpe.to_str()}
