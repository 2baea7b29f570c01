"""Several processes start on the same data at the same moment."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.dist.harness import run_ranks
from titan_muon.titan.data.loader import dataloader_config, tokenizer_config
from titan_muon.titan.data.tokenizers import ByteTokenizer
from titan_muon.titan.recipe.sections import Data


@pytest.fixture
def data(tmp_path: Path) -> Data:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i:02}.txt").write_text(f"document {i} " * 20)
    return Data(source="files", files=(str(tmp_path / "text" / "*.txt"),), cache=str(tmp_path / "cache"))


def _loader(data: Data, rank: int, world_size: int, batch: int):
    tokenizer = tokenizer_config(data).build()
    kwargs = {"dp_world_size": world_size, "dp_rank": rank, "seq_len": 32, "local_batch_size": batch}
    return dataloader_config(data).build(tokenizer=tokenizer, **kwargs)


def _labels(loader, batches: int) -> torch.Tensor:
    return torch.stack([labels for _, (_, labels) in zip(range(batches), loader, strict=False)])


class _Slow(ByteTokenizer):
    """Counts the calls, and sleeps so that every process arrives during the first build."""

    calls = 0

    def document(self, text: str) -> list[int]:
        type(self).calls += 1
        time.sleep(0.01)
        return super().document(text)


def _build_slowly(rank: int, world_size: int, data: Data) -> tuple[int, torch.Tensor]:
    kwargs = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 32, "local_batch_size": 2}
    dist.barrier()
    loader = dataloader_config(data).build(tokenizer=_Slow(ByteTokenizer.Config()), **kwargs)
    return _Slow.calls, _labels(loader, 3)


def test_a_single_process_builds_the_cache_and_every_rank_reads_it(data):
    results = run_ranks(_build_slowly, 3, data)
    assert sorted(calls for calls, _ in results) == [0, 0, 20]
    assert all(torch.equal(labels, results[0][1]) for _, labels in results)


def _train_bpe(rank: int, world_size: int, data: Data) -> str:
    dist.barrier()
    return tokenizer_config(data).build().fingerprint


def test_every_rank_gets_the_same_bpe(data):
    bpe = Data(source="files", files=data.files, cache=data.cache, tokenizer="bpe", vocab_size=270)
    assert len(set(run_ranks(_train_bpe, 2, bpe))) == 1
    assert len(list(Path(data.cache).glob("bpe-*/**/*.arrow"))) == 1


class _Failing(ByteTokenizer):
    def document(self, text: str) -> list[int]:
        raise RuntimeError("the disk is full")


def _fail_to_build(rank: int, world_size: int, data: Data) -> str:
    kwargs = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 32, "local_batch_size": 2}
    with pytest.raises(RuntimeError) as error:
        dataloader_config(data).build(tokenizer=_Failing(ByteTokenizer.Config()), **kwargs)
    return str(error.value)


def test_a_failed_build_is_an_error_on_every_rank(data):
    assert run_ranks(_fail_to_build, 2, data, timeout=60) == ["the disk is full"] * 2


class _Stuck(ByteTokenizer):
    def document(self, text: str) -> list[int]:
        time.sleep(600)
        return []


def _get_stuck(data: Data) -> None:
    kwargs = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 32, "local_batch_size": 2}
    dataloader_config(data).build(tokenizer=_Stuck(ByteTokenizer.Config()), **kwargs)


def test_a_process_killed_during_the_build_leaves_no_lock(data):
    """The next process finds the lock file and half of the tokens, and builds all the same."""
    process = multiprocessing.get_context("forkserver").Process(target=_get_stuck, args=(data,), daemon=True)
    process.start()
    while not list(Path(data.cache).glob("corpus-*/**/*.arrow")):
        assert process.is_alive(), "the process ended before it wrote"
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not list(Path(data.cache).glob("corpus-*/**/dataset_info.json"))
    assert _labels(_loader(data, 0, 1, 2), 3).shape == (3, 2, 32)
    assert not list(Path(data.cache).glob("*.tmp"))


def _save(rank: int, world_size: int, data: Data, folder: str) -> None:
    loader = _loader(data, rank, world_size, 2)
    _labels(loader, 3)
    dcp.save({"dataloader": loader}, checkpoint_id=folder)


def _load(rank: int, world_size: int, data: Data, folder: str) -> torch.Tensor:
    loader = _loader(data, rank, world_size, 1)
    dcp.load({"dataloader": loader}, checkpoint_id=folder)
    return _labels(loader, 2)


def test_a_checkpoint_of_two_ranks_continues_on_four(data, tmp_path):
    folder = os.fspath(tmp_path / "checkpoint")
    run_ranks(_save, 2, data, folder)
    resumed = torch.stack(run_ranks(_load, 4, data, folder), dim=1).flatten(0, 2)
    stream = _labels(_loader(data, 0, 1, 4), 5).flatten(0, 1)
    assert torch.equal(resumed, stream[12:20])
