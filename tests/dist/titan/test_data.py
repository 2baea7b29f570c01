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
from tests.unit.titan.data.test_data import build, data, take
from titan_muon.trainer.data.tokenizers import ByteTokenizer, tokenizer_config
from titan_muon.trainer.recipe.sections import Data

__all__ = ["data"]


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


@on_ranks(3)
def test_one_process_builds_the_cache_and_every_rank_reads_it(rank: int, data: Data) -> None:
    """A failed build is an error on every rank."""
    with pytest.raises(RuntimeError, match="the disk is full"):
        build(data, tokenizer=_Failing(ByteTokenizer.Config()))
    dist.barrier()
    labels = torch.stack(take(build(data, tokenizer=_Slow(ByteTokenizer.Config())), 3))
    assert sorted(on_all_ranks(_Slow.calls)) == [0, 0, 40]
    assert all(torch.equal(labels, others) for others in on_all_ranks(labels))
    bpe = tokenizer_config(replace(data, tokenizer="bpe", vocab_size=270)).build()
    assert len(set(on_all_ranks(bpe.fingerprint))) == len(list(Path(data.cache).glob("bpe-*.arrow"))) == 1


class _Stuck(ByteTokenizer):
    def documents(self, texts: list[str]) -> list[np.ndarray]:
        time.sleep(600)
        return []


def _get_stuck(data: Data) -> None:
    build(data, tokenizer=_Stuck(ByteTokenizer.Config()))


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
    assert len(take(build(data), 3)) == 3
    assert not list(Path(data.cache).glob("*.partial"))
