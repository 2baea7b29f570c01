"""Documents packed back to back into blocks of equal length, and blocks of several sources by weight."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from titan_muon.trainer.data.corpus import Corpus


class TokenBlock(NamedTuple):
    """Three int64 arrays of shape (seq_len,)."""

    inputs: np.ndarray
    labels: np.ndarray  # the token after each input, in the same document
    positions: np.ndarray  # from 0 in the block and in every document, which marks documents for attention


class _Epoch(NamedTuple):
    number: int
    documents: np.ndarray  # in reading order
    ends: np.ndarray  # of each document's predictions, in the epoch's stream


class TokenBlocks:
    """Endless stream of blocks over documents of a corpus; `documents`: indices into the corpus.

    With a seed, every epoch permutes the documents by (seed, epoch). Every prediction appears once per epoch, except
    for the last ones, fewer than `seq_len`.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, seq_len: int, *, seed: int | None) -> None:
        # Block k depends only on k: any rank can read any block, and a run resumes from a single number.
        self._corpus = corpus
        self._documents = documents
        self.seq_len = seq_len
        self._seed = seed
        self._predictions = corpus.tokens[documents] - 1  # all tokens of a document but the first
        self.tokens = int(self._predictions.sum())
        self.per_epoch = self.tokens // seq_len
        self._epoch = self._read_order(0)

    def __getitem__(self, number: int) -> TokenBlock:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch.number:
            self._epoch = self._read_order(epoch)
        return self._cut(self._epoch, index * self.seq_len)

    def _read_order(self, epoch: int) -> _Epoch:
        order = np.arange(len(self._documents))
        if self._seed is not None:
            # NumPy keeps raw draws equal over versions, but not Generator.permutation.
            order = np.argsort(np.random.PCG64([self._seed, epoch]).random_raw(len(order)), kind="stable")
        return _Epoch(epoch, self._documents[order], np.cumsum(self._predictions[order]))

    def _cut(self, epoch: _Epoch, first: int) -> TokenBlock:
        inputs, labels, positions = (np.empty(self.seq_len, dtype=np.int64) for _ in range(3))
        filled, i = 0, int(np.searchsorted(epoch.ends, first, side="right"))
        while filled < self.seq_len:
            at = first + filled
            length = min(int(epoch.ends[i]) - at, self.seq_len - filled)
            tokens = self._corpus.document(int(epoch.documents[i]))
            # Count from the document's end: the last prediction belongs to the last token.
            source = len(tokens) - 1 - (int(epoch.ends[i]) - at)
            inputs[filled : filled + length] = tokens[source : source + length]
            labels[filled : filled + length] = tokens[source + 1 : source + 1 + length]
            positions[filled : filled + length] = np.arange(length)
            filled, i = filled + length, i + 1
        return TokenBlock(inputs, labels, positions)


class MixedBlocks:
    """Endless stream of blocks of several sources; shares of the first k blocks are off by less than a block."""

    def __init__(self, sources: Sequence[TokenBlocks], weights: Sequence[float]) -> None:
        """`weights`: a source's ratio of blocks, in thousandths."""
        self._sources = sources
        whole = np.array([round(1000 * weight) for weight in weights])
        self._counts = whole // gcd(*whole.tolist())  # of each source's blocks in a cycle
        self._turns = _turns(self._counts)
        self.tokens = sum(source.tokens for source in sources)
        self.per_epoch = sum(source.per_epoch for source in sources)

    def __getitem__(self, number: int) -> TokenBlock:
        cycle, turn = divmod(number, len(self._turns))
        source, before = self._turns[turn]
        return self._sources[source][cycle * int(self._counts[source]) + before]


def _turns(counts: np.ndarray) -> list[tuple[int, int]]:
    """Source of each turn of a cycle, and the source's earlier turns.

    By the rule of Tijdeman, "The chairman assignment problem", 1980.
    """
    cycle, taken, turns = counts.sum(), np.zeros_like(counts), []
    slack = 1 / (2 * len(counts) - 2)
    for turn in range(1, cycle + 1):
        # Of the sources that may come now, the one that must come first.
        due = np.where(counts * turn - taken * cycle >= slack * cycle, (taken + 1 - slack) / counts, np.inf)
        source = int(due.argmin())
        turns.append((source, int(taken[source])))
        taken[source] += 1
    return turns
