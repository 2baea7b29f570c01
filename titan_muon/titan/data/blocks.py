"""Documents packed back to back into blocks of equal length."""

from dataclasses import dataclass

import numpy as np

from titan_muon.titan.data.corpus import Corpus


@dataclass(frozen=True)
class TokenBlock:
    """Three int64 arrays of shape (seq_len,).

    `labels[i]` is the token after `inputs[i]` in the same document. `positions` counts from 0 in the block and in every
    document, which marks documents for TorchTitan's attention and rotary embedding.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class _Epoch:
    """`documents` in reading order; document i's predictions end at `ends[i]` in the epoch's stream."""

    number: int
    documents: np.ndarray
    ends: np.ndarray


class TokenBlocks:
    """Endless stream of blocks over documents of a corpus.

    With a seed, every epoch permutes the documents by (seed, epoch). The last predictions of an epoch, fewer than
    `seq_len`, are dropped. Every other prediction appears exactly once per epoch.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, seq_len: int, *, seed: int | None) -> None:
        """`documents`: indices into the corpus. `per_epoch` is 0 if the documents are shorter than a block."""
        # Block k depends on k alone: any rank can read any block, and a run resumes from a single number.
        self._corpus = corpus
        self._documents = documents
        self.seq_len = seq_len
        self._seed = seed
        self._predictions = corpus.predictions[documents]
        self.per_epoch = int(self._predictions.sum()) // seq_len
        self._epoch = self._read_order(0)

    def __getitem__(self, number: int) -> TokenBlock:
        epoch, index = divmod(number, self.per_epoch)
        # Keep the order of one epoch, because ranks read blocks in ascending order.
        if epoch != self._epoch.number:
            self._epoch = self._read_order(epoch)
        return self._cut(self._epoch, index * self.seq_len)

    def _read_order(self, epoch: int) -> _Epoch:
        order = np.arange(len(self._documents))
        if self._seed is not None:
            # Sort raw draws: NumPy keeps the bit stream equal over versions, and not Generator.permutation.
            order = np.argsort(np.random.PCG64([self._seed, epoch]).random_raw(len(order)), kind="stable")
        return _Epoch(epoch, self._documents[order], np.cumsum(self._predictions[order]))

    def _cut(self, epoch: _Epoch, first: int) -> TokenBlock:
        inputs, labels, positions = (np.empty(self.seq_len, dtype=np.int64) for _ in range(3))
        tokens, starts = self._corpus.tokens, self._corpus.starts
        filled, i = 0, int(np.searchsorted(epoch.ends, first, side="right"))
        while filled < self.seq_len:
            at = first + filled
            length = min(int(epoch.ends[i]) - at, self.seq_len - filled)
            document = epoch.documents[i]
            # Count from the document's end: the last prediction belongs to the last token.
            source = int(starts[document + 1]) - 1 - (int(epoch.ends[i]) - at)
            inputs[filled : filled + length] = tokens[source : source + length]
            labels[filled : filled + length] = tokens[source + 1 : source + 1 + length]
            positions[filled : filled + length] = np.arange(length)
            filled, i = filled + length, i + 1
        return TokenBlock(inputs, labels, positions)
