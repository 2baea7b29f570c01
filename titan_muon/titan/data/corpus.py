"""All documents as an array of tokens, memory-mapped from a cache. No collectives."""

import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torchtitan.tools.logging import logger

from titan_muon.titan.data.cache import atomic, build_once, digest
from titan_muon.titan.data.documents import Documents
from titan_muon.titan.recipe.toml import plural

_FORMAT = "1"
"""Increment when the layout changes."""
CHECKED = ".checked"
"""Suffix of the file with the stamp of checked tokens."""
_SECONDS_BETWEEN_MESSAGES = 10.0


class DocumentTokenizer(Protocol):
    """Tokenizer of a corpus; `fingerprint` identifies the tokens of any text."""

    @property
    def fingerprint(self) -> str: ...

    def document(self, text: str) -> list[int]: ...

    def get_vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, in the order of `Documents.texts`, with opening and closing marks."""

    tokens: np.ndarray  # uint16 or uint32, read-only: documents back to back
    starts: np.ndarray  # int64: document d is `tokens[starts[d]:starts[d + 1]]`
    text_bytes: np.ndarray  # int64: UTF-8 bytes of each document
    digest: str

    @property
    def predictions(self) -> np.ndarray:
        """int64: predicted tokens per document, all but the first."""
        return np.diff(self.starts) - 1


class CorpusSource:
    """Opens the corpus of documents at first use."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        # TorchTitan's validator builds a loader for each validation.
        self._opened: Corpus | None = None

    def to_dict(self) -> dict[str, object]:
        return self.documents.to_dict()

    def open(self, tokenizer: DocumentTokenizer) -> Corpus:
        """Corpus under `tokenizer`. Raises RecipeError for bad `[data]`."""
        name = digest(_FORMAT, self.documents.digest, tokenizer.fingerprint)
        if self._opened is None or self._opened.digest != name:
            path = Path(self.documents.data.cache) / f"corpus-{name}"
            self._opened = build_once(
                path,
                load=lambda: _load(path, name, tokenizer.get_vocab_size()),
                build=lambda: _build(path, self.documents, tokenizer),
            )
        return self._opened


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _paths(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".index.npz"), path.with_suffix(".tokens")


def _load(path: Path, name: str, vocab_size: int) -> Corpus | None:
    index_path, tokens_path = _paths(path)
    if not index_path.exists():
        return None
    try:
        with np.load(index_path) as index:
            starts, text_bytes, checksum = index["starts"], index["text_bytes"], int(index["checksum"])
        tokens = np.memmap(tokens_path, dtype=_dtype(vocab_size), mode="r")
        # Check a new file once: a full disk may have cut it.
        sound = _stamp(tokens_path) == _checked_stamp(path) or zlib.crc32(tokens.data) == checksum
        problem = None if sound else "its checksum is wrong"
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        problem = str(error)
    if problem is not None:
        logger.warning("The corpus cached at %s is damaged (%s) and is built again", path, problem)
        return None
    if _stamp(tokens_path) != _checked_stamp(path):
        with suppress(OSError), atomic(path.with_suffix(CHECKED)) as temporary:
            temporary.write_text(_stamp(tokens_path), encoding="utf-8")
    return Corpus(tokens, starts, text_bytes, name)


def _stamp(tokens: Path) -> str:
    status = tokens.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _checked_stamp(path: Path) -> str:
    try:
        return path.with_suffix(CHECKED).read_text(encoding="utf-8")
    except OSError:
        return ""


def _build(path: Path, documents: Documents, tokenizer: DocumentTokenizer) -> None:
    index_path, tokens_path = _paths(path)
    megabytes = sum(file.size for file in documents.all) / 1e6
    logger.info("Tokenizing %s (%.1f MB of text)", plural(documents.count, "document"), megabytes)
    began = time.monotonic()
    # An aborted build leaves no index, or a wrong checksum.
    with atomic(index_path) as index, atomic(tokens_path) as tokens:
        starts, text_bytes, checksum = _write_tokens(tokens, documents, tokenizer)
        with open(index, "wb") as file:
            np.savez(file, starts=starts, text_bytes=text_bytes, checksum=np.array(checksum))
    seconds, size = time.monotonic() - began, tokens_path.stat().st_size / 1e6
    logger.info("%d tokens in %.1f s, cached at %s (%.1f MB)", starts[-1], seconds, tokens_path, size)


def _write_tokens(path: Path, documents: Documents, tokenizer: DocumentTokenizer) -> tuple[np.ndarray, np.ndarray, int]:
    vocab_size = tokenizer.get_vocab_size()
    lengths, text_bytes, checksum, logged = [0], [], 0, time.monotonic()
    with open(path, "wb") as file:
        for number, (source, text) in enumerate(documents.texts()):
            ids = np.asarray(tokenizer.document(text), dtype=np.int64)
            assert ids.max() < vocab_size, f"token {ids.max()} in {source.path}: the vocabulary ends at {vocab_size}"
            raw = ids.astype(_dtype(vocab_size)).tobytes()
            file.write(raw)
            checksum = zlib.crc32(raw, checksum)
            lengths.append(len(ids))
            text_bytes.append(len(text.encode()))
            if time.monotonic() - logged > _SECONDS_BETWEEN_MESSAGES:
                logged = time.monotonic()
                logger.info("Tokenized %d of %d documents", number + 1, documents.count)
    return np.cumsum(lengths, dtype=np.int64), np.array(text_bytes, dtype=np.int64), checksum
