"""Several processes start on the same data at the same moment."""

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import on_all_ranks, on_ranks
from titan_muon.trainer.data.loader import dataloader_config
from titan_muon.trainer.data.tokenizers import ByteTokenizer, tokenizer_config
from titan_muon.trainer.recipe.sections import Data


@pytest.fixture
def data(tmp_path: Path) -> Data:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i:02}.txt").write_text(f"document {i} " * 20)
    return Data(source="files", files=(str(tmp_path / "text" / "*.txt"),), cache=str(tmp_path / "cache"))


def _labels(loader, batches: int) -> torch.Tensor:
    return torch.stack([labels for _, (_, labels) in zip(range(batches), loader, strict=False)])


class _Slow(ByteTokenizer):
    """Counts the calls, and sleeps so that every process arrives during the first build."""

    calls = 0

    def documents(self, texts: list[str]) -> list[np.ndarray]:
        type(self).calls += len(texts)
        time.sleep(0.2)
        return super().documents(texts)


class _Failing(ByteTokenizer):
    def documents(self, texts: list[str]) -> list[np.ndarray]:
        raise RuntimeError("the disk is full")


def _build(tokenizer: ByteTokenizer, data: Data):
    shape = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 32, "local_batch_size": 2}
    return dataloader_config(data).build(tokenizer=tokenizer, **shape)


@on_ranks(3)
def test_one_process_builds_the_cache_and_every_rank_reads_it(rank: int, data: Data) -> None:
    """A failed build is an error on every rank."""
    with pytest.raises(RuntimeError, match="the disk is full"):
        _build(_Failing(ByteTokenizer.Config()), data)
    dist.barrier()
    labels = _labels(_build(_Slow(ByteTokenizer.Config()), data), 3)
    assert sorted(on_all_ranks(_Slow.calls)) == [0, 0, 20]
    assert all(torch.equal(labels, others) for others in on_all_ranks(labels))
    bpe = tokenizer_config(replace(data, tokenizer="bpe", vocab_size=270)).build()
    assert len(set(on_all_ranks(bpe.fingerprint))) == len(list(Path(data.cache).glob("bpe-*.arrow"))) == 1


class _Stuck(ByteTokenizer):
    def documents(self, texts: list[str]) -> list[np.ndarray]:
        time.sleep(600)
        return []


def _get_stuck(data: Data) -> None:
    _build(_Stuck(ByteTokenizer.Config()), data)


def test_a_process_killed_during_the_build_leaves_no_lock(data):
    """The next process finds the lock file and half of the tokens, and builds all the same."""
    process = multiprocessing.get_context("forkserver").Process(target=_get_stuck, args=(data,), daemon=True)
    process.start()
    while not list(Path(data.cache).glob("corpus-*.partial")):
        assert process.is_alive(), "the process ended before it wrote"
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not list(Path(data.cache).glob("corpus-*.arrow"))
    assert _labels(_build(ByteTokenizer(ByteTokenizer.Config()), data), 3).numel() == 3 * 2 * 32
    assert not list(Path(data.cache).glob("*.partial"))
