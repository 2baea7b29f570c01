"""Checkpoint files: any damage is detected, no code in the files runs, and a full disk is named."""

import errno
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titan_muon.titan import compat

compat.install()

from titan_muon.titan.run.checkpoints import flaw  # noqa: E402
from titan_muon.titan.storage.checksums import (  # noqa: E402
    CHECKSUMS,
    METADATA,
    SummingWriter,
    damage,
    read_checksums,
)
from titan_muon.titan.storage.reader import RefusedError, SafePlanner, SafeReader  # noqa: E402
from titan_muon.titan.storage.space import folder_bytes, free_bytes, full_disk, is_disk_full  # noqa: E402

STATE = {
    "weight": torch.arange(12.0).view(3, 4),
    "train_state": {"step": 3, "lr": 0.1, "betas": (0.9, 0.95), "name": "muon", "size": torch.Size((3, 4))},
}


class Bomb:
    """A pickle of this object writes a file on load."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-3"
    dcp.save(STATE, storage_writer=SummingWriter(folder, 3), no_dist=True)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step-3"))


def load(checkpoint: Path, state: dict[str, Any], planner: SafePlanner | None = None) -> None:
    dcp.load(state, storage_reader=SafeReader(checkpoint), planner=planner or SafePlanner(), no_dist=True)


def test_checksums_name_every_file_and_a_whole_checkpoint_loads(checkpoint: Path) -> None:
    document = json.loads((checkpoint / CHECKSUMS).read_text())
    assert document["format"] == 1
    assert document["step"] == 3
    assert document["world"] == 1
    assert set(document["files"]) == {"__0_0.distcp", METADATA}
    assert flaw(checkpoint) is None
    assert damage(checkpoint, None) is None
    loaded: dict[str, Any] = {"weight": torch.zeros(3, 4), "train_state": dict.fromkeys(STATE["train_state"], 0)}
    load(checkpoint, loaded)
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert loaded["train_state"] == STATE["train_state"]


def test_no_flipped_bit_of_any_file_passes(checkpoint: Path) -> None:
    """300 x 3 random bits: each is noticed without an escaping error, in `.metadata` before unpickling."""
    draw = random.Random(0)
    for name in (METADATA, "__0_0.distcp"):
        good = (checkpoint / name).read_bytes()
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(3):
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            (checkpoint / name).write_bytes(bytes(bad))
            reason = damage(checkpoint, None)
            assert reason is not None
            assert name in reason
            if name == METADATA:
                assert flaw(checkpoint) is not None
        (checkpoint / name).write_bytes(good)
    assert damage(checkpoint, None) is None


def test_damaged_metadata_without_checksums_is_reported_without_an_exception(checkpoint: Path) -> None:
    """Earlier versions saved no checksums; a pickle of garbage raises MemoryError, TypeError and more."""
    (checkpoint / CHECKSUMS).unlink()
    draw = random.Random(0)
    good = (checkpoint / METADATA).read_bytes()
    reasons = 0
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(3):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        (checkpoint / METADATA).write_bytes(bytes(bad))
        reasons += flaw(checkpoint) is not None
    assert reasons > 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2, "files": {}}', "its format 2 is newer than this version's 1"),
        ('{"format": 1, "files": {"__0_0.distcp": {"bytes": 1, "crc32": "00000000"}}}', ".metadata"),
    ],
)
def test_damaged_checksums_are_reported(text: str, reason: str, checkpoint: Path) -> None:
    (checkpoint / CHECKSUMS).write_text(text)
    assert reason in str(flaw(checkpoint))


def test_missing_and_short_files_are_named(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-10])
    assert "bytes" in str(damage(checkpoint, None))
    data.unlink()
    assert "__0_0.distcp cannot be read" in str(damage(checkpoint, None))
    (checkpoint / CHECKSUMS).unlink()
    assert read_checksums(checkpoint) is None
    assert damage(checkpoint, None) is None, "a checkpoint of an earlier version has no checksums"


def test_hostile_metadata_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    """Without checksums, because an attacker can write checksums too."""
    (checkpoint / CHECKSUMS).unlink()
    sign = tmp_path / "ran"
    (checkpoint / METADATA).write_bytes(pickle.dumps(Bomb(sign)))
    assert "it names posix.system, which no checkpoint needs" in str(flaw(checkpoint))
    with pytest.raises(RefusedError):
        SafeReader(checkpoint).read_metadata()
    assert not sign.exists()


@pytest.mark.parametrize("wrapped", [False, True], ids=["object", "pickle inside bytes"])
def test_hostile_objects_run_no_code(wrapped: bool, tmp_path: Path) -> None:
    """TorchTitan's loader of Hugging Face data keeps a pickle inside bytes."""
    sign, folder = tmp_path / "ran", tmp_path / "step-1"
    bomb: Any = pickle.dumps(Bomb(sign)) if wrapped else Bomb(sign)
    dcp.save({"train_state": {"step": bomb}}, storage_writer=SummingWriter(folder, 1), no_dist=True)
    with pytest.raises(CheckpointException, match=r"UnpicklingError|RefusedError"):
        load(folder, {"train_state": {"step": 0}})
    assert not sign.exists()


def test_plain_pickles_inside_bytes_load(tmp_path: Path) -> None:
    state = {"loader": {"rank": pickle.dumps({"epoch": 1, "sample": [1, 2.0, None, "text"]})}}
    dcp.save(state, storage_writer=SummingWriter(tmp_path / "step-1", 1), no_dist=True)
    loaded = {"loader": {"rank": b""}}
    load(tmp_path / "step-1", loaded)
    assert loaded == state


def test_missing_optional_values_stay_and_missing_required_values_are_an_error(checkpoint: Path) -> None:
    planner = SafePlanner(optional=lambda key: key == "train_state.new")
    loaded: dict[str, Any] = {"train_state": {"step": 0, "new": 7}}
    load(checkpoint, loaded, planner)
    assert loaded == {"train_state": {"step": 3, "new": 7}}
    assert planner.missing == ("train_state.new",)
    with pytest.raises(CheckpointException, match="other"):
        load(checkpoint, {"train_state": {"step": 0, "other": 7}})


def test_a_full_disk_is_recognized_and_named(tmp_path: Path) -> None:
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(error)
    assert is_disk_full(CheckpointException("write", {1: (error, None)}))  # type: ignore[dict-item]
    assert not is_disk_full(ValueError("other"))
    assert free_bytes(tmp_path / "not" / "yet") > 0
    (tmp_path / "file").write_bytes(b"12345")
    assert folder_bytes(tmp_path) == 5
    text = full_disk(tmp_path, 9, 2000, 1000, 6)
    assert f"step 9 is not saved: {tmp_path} has 1,000 bytes free, and a checkpoint takes about 2,000" in text
    assert "the newest whole checkpoint is step 6" in text


def test_dtypes_and_layouts_of_every_state_can_be_read(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    state = {str(kind): torch.zeros(2, 2, dtype=kind) for kind in kinds}
    dcp.save(state, storage_writer=SummingWriter(tmp_path / "step-1", 1), no_dist=True)
    metadata = SafeReader(tmp_path / "step-1").read_metadata()
    assert set(metadata.state_dict_metadata) == set(state)
    assert io.BytesIO((tmp_path / "step-1" / METADATA).read_bytes()).read(1) == b"\x80"
