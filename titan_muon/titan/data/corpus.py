"""All documents as tokens, memory-mapped from a cache. No collectives."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from pyarrow import ChunkedArray
from torchtitan.tools.logging import logger

from titan_muon.options import plural
from titan_muon.titan.data.cache import cached, digest
from titan_muon.titan.data.documents import Documents
from titan_muon.titan.data.tokenizers import DocumentTokenizer
from titan_muon.titan.recipe import RecipeError

_FORMAT = "1"
"""Increment when the tokens of a text change."""
_COLUMNS = {"ids": "large_binary", "tokens": "int64", "text_bytes": "int64"}
_SECONDS_BETWEEN_MESSAGES = 10.0


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, in the order of `Documents.contents`, with opening and closing marks."""

    ids: ChunkedArray  # of each document, as bytes of `dtype`
    dtype: np.dtype
    tokens: np.ndarray  # int64: number of each document's tokens
    text_bytes: np.ndarray  # int64: UTF-8 bytes of each document; 0 for documents of tokens
    digest: str

    def document(self, number: int) -> np.ndarray:
        """Tokens of a document, read-only."""
        return np.frombuffer(self.ids[number].as_buffer(), dtype=self.dtype)


@lru_cache(maxsize=2)  # TorchTitan's validator builds a loader for each validation
def open_corpus(documents: Documents, tokenizer: DocumentTokenizer) -> Corpus:
    """Corpus of documents under `tokenizer`. Raises RecipeError for bad `[data]`."""
    name = digest(_FORMAT, documents.digest, tokenizer.fingerprint)
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    rows = _tokenize(documents, tokenizer, dtype)
    table = cached(documents.data.cache, f"corpus-{name}", rows, _COLUMNS)
    return Corpus(table["ids"], dtype, table["tokens"].to_numpy(), table["text_bytes"].to_numpy(), name)


def _tokenize(documents: Documents, tokenizer: DocumentTokenizer, dtype: np.dtype) -> Iterator[dict[str, Any]]:
    megabytes = sum(file.size for file in documents.all) / 1e6
    logger.info("Tokenizing %s (%.1f MB)", plural(documents.count, "document"), megabytes)
    vocab_size, tokens = tokenizer.get_vocab_size(), 0
    began = logged = time.monotonic()
    for number, (file, content) in enumerate(documents.contents()):
        text = "" if file.has_tokens else content.decode("utf-8", errors="replace")
        ids = np.asarray(tokenizer.document(text), dtype=np.int64)
        if file.has_tokens:
            ids = np.concatenate([ids[:1], np.frombuffer(content, "<u4"), ids[-1:]])
        if ids.max() >= vocab_size:
            remedy = "choose the tokenizer and data.token_dtype of these tokens"
            raise RecipeError(
                f"data.files: token {ids.max()} in {file.path}: data.tokenizer has {vocab_size}; {remedy}"
            )
        yield {"ids": ids.astype(dtype).tobytes(), "tokens": len(ids), "text_bytes": len(text.encode())}
        tokens += len(ids)
        if time.monotonic() - logged > _SECONDS_BETWEEN_MESSAGES:
            logged = time.monotonic()
            logger.info("Tokenized %d of %d documents", number + 1, documents.count)
    seconds, size = time.monotonic() - began, tokens * dtype.itemsize / 1e6
    logger.info("%d tokens in %.1f s, cached in %s (%.1f MB)", tokens, seconds, documents.data.cache, size)
