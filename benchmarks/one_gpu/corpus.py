"""Tokens of the text files of this machine's Python packages: a corpus without a download."""

from __future__ import annotations

import hashlib
import site
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt")
SHORTEST, LONGEST = 200, 500_000
"""Characters of a document."""
HELD_OUT = 3
"""Documents with a smaller first byte of the hash are for validation: 3 of 256."""
SAMPLE = 4000
"""Most documents to train the tokenizer with."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of documents, each with an end token: 1D int32 for training and for validation."""

    training: Tensor
    validation: Tensor
    characters_per_token: float


def folders() -> list[Path]:
    """Folders of Python packages, and of the standard library."""
    return [Path(name) for name in (*site.getsitepackages(), sysconfig.get_path("stdlib"))]


def documents(roots: Sequence[Path], most: int) -> Iterator[tuple[str, bool]]:
    """Texts up to `most` characters in all, each once, in an order by hash, and whether for validation."""
    files = {file for root in roots for file in root.rglob("*") if file.suffix in ENDINGS}
    seen: set[bytes] = set()
    total = 0
    for file in sorted(files, key=lambda file: hashlib.md5("/".join(file.parts[-2:]).encode()).digest()):
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        key = hashlib.md5(text.encode()).digest()
        if not SHORTEST <= len(text) <= LONGEST or key in seen:
            continue
        seen.add(key)
        # The first one too, so that a small corpus has a validation.
        yield text, key[0] < HELD_OUT or len(seen) == 1
        total += len(text)
        if total > most:
            return


def tokens(cache: Path, vocabulary: int, most: int, roots: Sequence[Path] | None = None) -> Tokens:
    """The corpus, with a byte-pair vocabulary trained on it. Kept in `cache`."""
    file = cache / f"tokens-{vocabulary}-{most}.pt"
    if file.exists():
        return Tokens(**torch.load(file, weights_only=True))
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    found = list(documents(folders() if roots is None else roots, most))
    training, held = ([text for text, is_held in found if is_held == kind] for kind in (False, True))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training[:: -(-len(training) // SAMPLE)], trainer)

    def encoded(texts: list[str]) -> Tensor:
        lists = [torch.tensor([*item.ids, 0], dtype=torch.int32) for item in tokenizer.encode_batch(texts)]
        return torch.cat(lists)

    parts = {"training": encoded(training), "validation": encoded(held)}
    ratio = sum(map(len, training)) / len(parts["training"])
    cache.mkdir(parents=True, exist_ok=True)
    torch.save({**parts, "characters_per_token": ratio}, file)
    return Tokens(**parts, characters_per_token=ratio)
