"""Batches for TorchTitan's trainer and validator from a `[data]` table. No collectives."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

from titan_muon.options import plural
from titan_muon.trainer.data.blocks import MixedBlocks, TokenBlock, TokenBlocks
from titan_muon.trainer.data.cache import digest
from titan_muon.trainer.data.corpus import open_corpus
from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.data.tokenizers import DocumentTokenizer
from titan_muon.trainer.device import pins_batches
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.sections import Data
from titan_muon.trainer.recipe.toml import without_password

NOT_COUNTED = -100
"""Label without loss, as in PyTorch and TorchTitan."""
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class PackedDataLoader(BaseDataLoader):
    """Batches of packed blocks. A step's tokens depend only on the seed and the global batch size."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: Documents
        infinite: bool = True
        """Read epoch after epoch."""
        validation: bool = False
        """Read the held-out documents once, in order, from the start in every iteration."""
        sequences: int = -1
        """Limit on the sequences of a validation over all ranks; -1: all."""
        multiple: int = 1
        """Pad a pass with filler sequences to a multiple of this number over all ranks."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: DocumentTokenizer,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        """Raises RecipeError if the text is shorter than a block. `unused`: TorchTitan's options of other loaders."""
        documents, corpus = config.documents, open_corpus(config.documents, tokenizer)
        data, held_out = documents.data, config.validation
        numbers = documents.validation if held_out else documents.training
        sources, entries = [numbers], range(len(data.files))
        if mixed := len(data.weights) > 1 and not held_out:
            sources = [numbers[documents.entries()[numbers] == entry] for entry in entries]
        blocks = [TokenBlocks(corpus, source, seq_len, seed=None if held_out else data.seed) for source in sources]
        for entry, source in enumerate(blocks):
            if source.per_epoch < 1:
                side, remedy = "training", "Add text or lower training.seq_len."
                if held_out:
                    side = "held-out"
                    remedy = "Raise data.validation_fraction, lower training.seq_len, or set validator.enable = false."
                of = f" of data.files[{entry}]" if mixed else ""
                raise RecipeError(f"The {side} text{of} has no block of training.seq_len = {seq_len} tokens. {remedy}")
        self._sources = blocks
        self._blocks = MixedBlocks(blocks, data.weights) if mixed else blocks[0]
        self.available = self._blocks.per_epoch
        # Ranks read a single stream in turns, so that a run resumes on any number of ranks.
        self._batch = local_batch_size
        self._first = dp_rank * local_batch_size
        self._stride = dp_world_size * local_batch_size
        self._read = 0
        self._rewinds = held_out
        self._documents = documents
        # End of the single pass; None: endless epochs.
        self._end: int | None = None
        if held_out or not config.infinite:
            self._end = self.available if config.sequences == -1 else min(config.sequences, self.available)
        # Equal on every rank, so that none waits in a collective for ever. Filler blocks pad the last batches.
        whole = math.lcm(self._stride, config.multiple)
        self.batches = None if self._end is None else -(-self._end // whole) * (whole // self._stride)
        weights = [(file.entry, data.weights[file.entry]) for file in documents.all] if mixed else []
        keys = (data.validation_fraction, data.seed, seq_len, *weights)
        self.fingerprint = digest(corpus.digest, *map(str, keys))

    def __iter__(self) -> Iterator[Batch]:
        """({"input", "positions"}, labels), each int64 (sequences, seq_len); pinned with CUDA.

        A thread makes the next batch, so that a step does not wait for its text.
        """
        if self._rewinds:
            self._read = 0
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            following = self._start_batch(pool)
            while self.batches is None or self._read < self.batches * self._stride:
                batch = following.result()
                # Before the yield: the checkpoint of a step includes the step's batch, and not the prefetched one.
                self._read += self._stride
                following = self._start_batch(pool)
                yield batch

    def _start_batch(self, pool: ThreadPoolExecutor) -> Future[Batch]:
        return pool.submit(self._make_batch, range(self.position, self.position + self._batch))

    @property
    def blocks(self) -> int:
        return self._read

    @property
    def position(self) -> int:
        return self._read + self._first

    def describe(self, steps: int, sequences: int) -> list[str]:
        """Lines on documents, tokens, passes over them in `steps` more steps, weights, skipped rows, doubtful files.

        `sequences`: of a step, over all ranks.
        """
        documents, training = self._documents, len(self._documents.training)
        text = "Python's standard library" if documents.data.source == "python" else "data.files"
        blocks = self._read + steps * sequences
        line = (
            f"data: {plural(training, 'document')} of {text} with {self._blocks.tokens:,} tokens, and "
            f"{documents.count - training:,} held out; the run makes {_passes(blocks / self.available)} over them"
        )
        total, lines = sum(documents.data.weights), [line]
        for file, weight, source in zip(documents.data.files, documents.data.weights, self._sources, strict=False):
            share = weight / total
            passes = _passes(blocks * share / source.per_epoch)
            lines.append(f"data: {share:.1%} of the blocks from {file}, {source.tokens:,} tokens, {passes}")
        lines += [f"data: {file}" for file in documents.summary()]
        return [without_password(line) for line in (*lines, *(f"warning: {w}" for w in documents.warnings()))]

    def state_dict(self) -> dict[str, Any]:
        """`blocks`: read by all ranks together. `stream`: digest of text, tokenizer, split, seed and seq_len."""
        return {"blocks": self._read, "stream": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the saved blocks. Raises ValueError for another stream."""
        if state_dict["stream"] != self.fingerprint:
            raise ValueError(
                "The checkpoint was reading other data: the text, data.tokenizer, data.vocab_size, "
                "data.validation_fraction, data.weights, data.seed or training.seq_len differs. Restore them, or set "
                'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning.'
            )
        self._read = state_dict["blocks"]

    def _make_batch(self, numbers: range) -> Batch:
        blocks = [self._block(number) for number in numbers]
        arrays = (np.stack(part) for part in zip(*blocks, strict=True))
        inputs, labels, positions = map(torch.from_numpy, arrays)
        if pins_batches():
            inputs, labels, positions = (tensor.pin_memory() for tensor in (inputs, labels, positions))
        return {"input": inputs, "positions": positions}, labels

    def _block(self, number: int) -> TokenBlock:
        if self._end is None or number < self._end:
            return self._blocks[number]
        filler = self._blocks[0]
        return filler._replace(labels=np.full_like(filler.labels, NOT_COUNTED))


def _passes(count: float) -> str:
    return f"{count:,.1f} passes" if count >= 1 else f"{count:.2g} passes"


def dataloader_config(data: Data, *, validation: bool = False) -> Any:
    """Configuration of a loader. Reads no text.

    Raises RecipeError for an unknown `data.dataset`.
    """
    if data.source == "hf":
        return _text_loader_config(data, validation=validation)
    return PackedDataLoader.Config(documents=Documents(data), validation=validation)


def _text_loader_config(data: Data, *, validation: bool) -> Any:
    # The import takes seconds.
    from torchtitan.hf_datasets.text_datasets import DATASETS as known

    name = f"{data.dataset}_validation" if validation else data.dataset
    if data.dataset not in known:
        raise RecipeError(f"= {data.dataset!r}: TorchTitan knows {', '.join(sorted(known))}", key="data.dataset")
    if name not in known:
        raise RecipeError(
            f"= {data.dataset!r}: TorchTitan has no {name!r} to validate on; set validator.enable = false",
            key="data.dataset",
        )
    from titan_muon.trainer.torchtitan.hf_text import HFTextLoader

    return HFTextLoader.Config(dataset=name, dataset_path=data.dataset_path, num_workers=data.workers)


def bytes_per_token(config: Any, tokenizer: DocumentTokenizer, seq_len: int) -> float | None:
    """UTF-8 bytes per predicted token in a loader's sequences; None for source `hf`, and for files of tokens."""
    if not isinstance(config, PackedDataLoader.Config):
        return None
    documents, corpus = config.documents, open_corpus(config.documents, tokenizer)
    side = documents.validation if config.validation else documents.training
    if not corpus.text_bytes[side].all():
        return None
    # The loss counts closing marks, which have no bytes. A cut document counts in proportion to its tokens.
    ends = np.cumsum(corpus.tokens[side] - 1)
    sequences = ends[-1] // seq_len if config.sequences == -1 else config.sequences
    predicted = min(sequences * seq_len, ends[-1])
    read = np.interp(predicted, [0, *ends], [0, *np.cumsum(corpus.text_bytes[side])])
    return float(read / predicted)
