"""All documents as tokens, memory-mapped from a cache. No collectives."""

import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from pyarrow import ChunkedArray
from tqdm import tqdm

from titan_muon.options import plural
from titan_muon.trainer.data.cache import cached, digest
from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.data.files import DataFile
from titan_muon.trainer.data.tokenizers import DocumentTokenizer
from titan_muon.trainer.recipe import RecipeError

logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Increment when the tokens of a text change."""
_COLUMNS = {"ids": "large_binary", "tokens": "int64", "text_bytes": "int64", "crc": "uint32"}
_BYTES_AT_ONCE, _DOCUMENTS_AT_ONCE = 1 << 22, 1000


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, in the order of `Documents.contents`, with opening and closing marks."""

    ids: ChunkedArray  # of each document, as bytes of `dtype`
    dtype: np.dtype
    tokens: np.ndarray  # int64: number of each document's tokens
    text_bytes: np.ndarray  # int64: UTF-8 bytes of each document; 0 for documents of tokens
    crc: np.ndarray  # uint32: CRC-32 of each document's ids
    digest: str  # of text and tokenizer
    file: str
    _checked: set[int] = field(default_factory=set)

    def document(self, number: int) -> np.ndarray:
        """Tokens of a document, read-only.

        Raises RuntimeError for a document that is not as it was written, at the first reading: a damaged cache of one
        node would train other text there.
        """
        ids = self.ids[number].as_buffer()
        if number not in self._checked:
            if zlib.crc32(ids) != self.crc[number] or len(ids) != self.tokens[number] * self.dtype.itemsize:
                problem = f"data.cache: {self.file} is damaged: document {number} has other tokens than were written"
                raise RuntimeError(f"{problem}. Delete the file, and start again: it is made again from the text.")
            self._checked.add(number)
        return np.frombuffer(ids, dtype=self.dtype)


@lru_cache(maxsize=2)  # TorchTitan's validator builds a loader for each validation
def open_corpus(documents: Documents, tokenizer: DocumentTokenizer) -> Corpus:
    """Corpus of documents under `tokenizer`. Raises RecipeError for bad `[data]`."""
    name = digest(_FORMAT, documents.digest, tokenizer.fingerprint)
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    rows = _tokenize(documents, tokenizer, dtype)
    # In 0.2.0 the table had no checksums, and no "2" in its name.
    table = cached(documents.data.cache, f"corpus-2-{name}", rows, _COLUMNS)
    tokens, text_bytes, crc = (table[column].to_numpy() for column in ("tokens", "text_bytes", "crc"))
    return Corpus(table["ids"], dtype, tokens, text_bytes, crc, name, f"{documents.data.cache}/corpus-2-{name}.arrow")


def _tokenize(documents: Documents, tokenizer: DocumentTokenizer, dtype: np.dtype) -> Iterator[dict[str, Any]]:
    megabytes = sum(file.size for file in documents.all) / 1e6
    logger.info("Tokenizing %s (%.1f MB)", plural(documents.count, "document"), megabytes)
    tokens, began = 0, time.monotonic()
    # A log file gets a line a minute.
    pause = 0.1 if sys.stderr.isatty() else 60.0
    hidden = not logger.isEnabledFor(logging.INFO)
    options: dict[str, Any] = {"unit": "document", "leave": False, "mininterval": pause, "delay": pause}
    with tqdm(total=documents.count, disable=hidden, **options) as bar:
        for rows in _encoded(documents, partial(_encode, tokenizer=tokenizer, dtype=dtype)):
            tokens += sum(row["tokens"] for row in rows)
            yield from rows
            bar.update(len(rows))
    seconds, size = time.monotonic() - began, tokens * dtype.itemsize / 1e6
    logger.info("%d tokens in %.1f s, cached in %s (%.1f MB)", tokens, seconds, documents.data.cache, size)


_Batch = list[tuple[DataFile, bytes]]
_Rows = list[dict[str, Any]]


def _encoded(documents: Documents, encode: Callable[[_Batch], _Rows]) -> Iterator[_Rows]:
    """Rows of the documents in order, by `data.workers` processes."""
    if documents.data.workers == 0:
        yield from map(encode, _batches(documents))
        return
    # Threads of the tokenizer beside processes would be too many, and stop at a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with get_context("fork").Pool(documents.data.workers) as pool:
        # A full pipe to the processes ends the reading ahead.
        yield from pool.imap(encode, _batches(documents))


def _batches(documents: Documents) -> Iterator[_Batch]:
    """The documents in order, some at once. A document may be a book."""
    batch: _Batch = []
    size = 0
    for file, content in documents.contents():
        batch.append((file, content))
        size += len(content)
        if size >= _BYTES_AT_ONCE or len(batch) == _DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: _Batch, tokenizer: DocumentTokenizer, dtype: np.dtype) -> _Rows:
    """A row of _COLUMNS for each document. Raises RecipeError for a token outside of the vocabulary."""
    texts = ["" if file.has_tokens else content.decode("utf-8", errors="replace") for file, content in batch]
    vocab_size, rows = tokenizer.get_vocab_size(), []
    for (file, content), text, ids in zip(batch, texts, tokenizer.documents(texts), strict=True):
        if file.has_tokens:
            ids = np.concatenate([ids[:1], np.frombuffer(content, "<u4"), ids[-1:]])
            if ids.max() >= vocab_size:
                remedy = "choose the tokenizer and data.token_dtype of these tokens"
                problem = f"token {ids.max()} in {file.path}: data.tokenizer has {vocab_size}; {remedy}"
                raise RecipeError(f": {problem}", key="data.files")
        stored = ids.astype(dtype).tobytes()
        size = len(text.encode())
        rows.append({"ids": stored, "tokens": len(ids), "text_bytes": size, "crc": zlib.crc32(stored)})
    return rows
