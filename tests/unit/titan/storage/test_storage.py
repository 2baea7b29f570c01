"""Checkpoint files: any damage is detected, no code in the files runs, and a full disk is named."""

import io
import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from titan_muon.trainer.data.loader import dataloader_config
from titan_muon.trainer.data.tokenizers import ByteTokenizer
from titan_muon.trainer.recipe.sections import Data
from titan_muon.trainer.run.checkpoints import _first_failure, flaw
from titan_muon.trainer.run_folder import CHECKSUMS, METADATA, damage
from titan_muon.trainer.storage.checksums import SummingWriter
from titan_muon.trainer.storage.reader import METADATA as ALLOWED_METADATA
from titan_muon.trainer.storage.reader import RefusedError, SafePlanner, SafeReader, _SafeUnpickler

DATA = "__0_0.distcp"
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
    assert [document[key] for key in ("format", "step", "world")] == [1, 3, 1]
    assert set(document["files"]) == {DATA, METADATA}
    assert flaw(checkpoint) is None
    assert damage(checkpoint) is None
    loaded: dict[str, Any] = {"weight": torch.zeros(3, 4), "train_state": dict.fromkeys(STATE["train_state"], 0)}
    load(checkpoint, loaded)
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert loaded["train_state"] == STATE["train_state"]


def test_no_flipped_bit_of_any_file_passes(checkpoint: Path) -> None:
    """Each is noticed without an escaping error, in `.metadata` before unpickling."""
    draw, reasons = random.Random(0), 0
    for name in (DATA, METADATA):
        good = (checkpoint / name).read_bytes()
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(3):
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            (checkpoint / name).write_bytes(bad)
            assert name in str(damage(checkpoint))
            # Without checksums a pickle of garbage raises MemoryError, TypeError and more, and none may escape.
            reasons += name == METADATA and flaw(checkpoint) is not None
        (checkpoint / name).write_bytes(good)
    assert damage(checkpoint) is None
    assert reasons > 200


def beside(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda files: {**files, name: files[DATA]}


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("files", lambda files: {}, "has no entry for .metadata"),
        ("files", lambda files: {METADATA: {"bytes": "x", "crc32": "00000000"}}, "cannot be read"),
        ("files", lambda files: {DATA: files[DATA]}, f"{CHECKSUMS} has no entry for {METADATA}"),
        ("files", lambda files: {METADATA: files[METADATA]}, f"{CHECKSUMS} has no entry for {DATA}"),
        ("files", beside("../../../dev/zero"), "names ../../../dev/zero outside of the checkpoint"),
        ("files", beside(".."), "names .. outside of the checkpoint"),
        ("format", lambda number: 2, "its format 2 is newer than this version's 1"),
        ("step", lambda step: 4, "the files are of step 4"),
    ],
)
def test_wrong_checksums_are_reported_and_vouch_for_no_file(
    key: str, change: Callable[[Any], Any], reason: str, checkpoint: Path
) -> None:
    file = checkpoint / CHECKSUMS
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, key: change(document[key])}))
    assert reason in str(damage(checkpoint))
    file.write_text("[]")
    assert "cannot be read" in str(damage(checkpoint))


def test_files_outside_of_the_folder_and_devices_are_not_read(checkpoint: Path) -> None:
    """A device would be read for ever."""
    (checkpoint / DATA).unlink()
    (checkpoint / DATA).symlink_to("/dev/zero")
    assert f"{DATA} cannot be read" in str(damage(checkpoint))
    (checkpoint / CHECKSUMS).unlink()
    metadata = SafeReader(checkpoint).read_metadata()
    for index, entry in metadata.storage_data.items():
        metadata.storage_data[index] = replace(entry, relative_path="../other.distcp")
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    assert f"{METADATA} names ../other.distcp outside of the checkpoint" in str(flaw(checkpoint))


def test_missing_short_and_other_files_are_named(checkpoint: Path) -> None:
    """A flipped byte of a file without a checksum would be loaded."""
    (checkpoint / "more.distcp").write_bytes(b"x")
    assert f"{CHECKSUMS} has no entry for more.distcp" in str(damage(checkpoint))
    (checkpoint / "more.distcp").unlink()
    data = checkpoint / DATA
    data.write_bytes(data.read_bytes()[:-10])
    assert "bytes" in str(damage(checkpoint))
    data.unlink()
    assert f"{DATA} cannot be read" in str(damage(checkpoint))
    (checkpoint / CHECKSUMS).unlink()
    assert "checksums.json is missing" in str(damage(checkpoint))


def test_hostile_metadata_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    """Without checksums, because an attacker can write checksums too."""
    (checkpoint / CHECKSUMS).unlink()
    sign = tmp_path / "ran"
    (checkpoint / METADATA).write_bytes(pickle.dumps(Bomb(sign)))
    assert "it names posix.system, which no checkpoint needs" in str(flaw(checkpoint))
    with pytest.raises(RefusedError):
        SafeReader(checkpoint).read_metadata()
    assert not sign.exists()


@pytest.mark.parametrize("args", [None, b")R", b"K\x00\x85R", b")\x81"], ids=["itself", "made", "made of 0", "new"])
@pytest.mark.parametrize("attribute", ["is_file", "__defaults__", "__setstate__", "_value_"])
def test_a_pickle_changes_no_attribute_of_this_process(attribute: str, args: bytes | None) -> None:
    """BUILD on every allowed name, and on the object that the name makes."""
    name = attribute.encode()
    state = b"N}X" + len(name).to_bytes(4, "little") + name + b")s\x86b"
    members = [dict(vars(member)) for member in _MEM_FORMAT_ENCODING]
    for (module, qualname), value in ALLOWED_METADATA.items():
        before = dict(vars(value)) if hasattr(value, "__dict__") else {}
        content = f"\x80\x02c{module}\n{qualname}\n".encode("latin1") + (args or b"") + state + b"."
        with suppress(Exception):
            _SafeUnpickler(io.BytesIO(content)).load()
        after = dict(vars(value)) if hasattr(value, "__dict__") else {}
        assert after == before, f"{module}.{qualname}"
        assert getattr(value, "__defaults__", None) is None or attribute != "__defaults__"
    assert [dict(vars(member)) for member in _MEM_FORMAT_ENCODING] == members


def test_hostile_objects_run_no_code(tmp_path: Path) -> None:
    sign, folder = tmp_path / "ran", tmp_path / "step-1"
    dcp.save({"train_state": {"step": Bomb(sign)}}, storage_writer=SummingWriter(folder, 1), no_dist=True)
    with pytest.raises(CheckpointException, match="UnpicklingError") as error:
        load(folder, {"train_state": {"step": 0}})
    assert not sign.exists()
    assert "posix.system" in _first_failure(error.value)
    assert "weights_only" not in _first_failure(error.value), "PyTorch advises to load without this protection"


@pytest.fixture(scope="module")
def hf_loader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loader of `data.source = "hf"` without a download."""
    import datasets

    folder = tmp_path_factory.mktemp("text")
    (folder / "data.json").write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(9)))
    config = dataloader_config(Data(source="hf", dataset="c4_test", dataset_path=str(folder)))
    tokenizer = ByteTokenizer.Config().build()
    shape = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 4, "local_batch_size": 1}
    built: list[Any] = []
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache")):
        yield lambda: built.append(config.build(tokenizer=tokenizer, **shape)) or built[-1]
    for loader in built:
        getattr(loader, "close", lambda: None)()


def test_no_saved_value_carries_a_pickle_into_the_data_loader(hf_loader: Any, tmp_path: Path) -> None:
    """Of the types that PyTorch's weights-only load can return."""
    sign, file = tmp_path / "ran", tmp_path / "file"
    content = pickle.dumps(Bomb(sign))
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    for carrier in (content, content.decode("latin1"), {"a": content}, Counter(content), tensor, 1, None):
        torch.save(carrier, file)
        with (
            mock.patch.object(pickle, "loads", side_effect=AssertionError("pickle.loads was called")),
            pytest.raises(ValueError, match=r"state of the data loader cannot be read.*exclude_from_loading"),
        ):
            hf_loader().load_state_dict({"dp_rank_0": torch.load(file, weights_only=True), "world_size": 1})
    assert not sign.exists()


def test_the_position_of_another_versions_loader_is_refused(hf_loader: Any) -> None:
    for keys in (("_snapshot", "_steps_since_snapshot"), ("parent_state", "another")):
        state = {"dp_rank_0": json.dumps(dict.fromkeys(keys, 0)), "world_size": 1}
        with pytest.raises(ValueError, match=r"another version of TorchTitan.*exclude_from_loading"):
            hf_loader().load_state_dict(state)


def test_the_hf_loader_continues_from_its_checkpoint(hf_loader: Any, tmp_path: Path) -> None:
    first, second = hf_loader(), hf_loader()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    assert isinstance(state["dp_rank_0"], str)
    dcp.save({"dataloader": state}, storage_writer=SummingWriter(tmp_path / "step-1", 1), no_dist=True)
    with mock.patch.object(pickle, "loads", side_effect=AssertionError("pickle.loads was called")):
        load(tmp_path / "step-1", {"dataloader": second})
    assert torch.equal(next(iter(second))[0]["input"], next(batches)[0]["input"])


def test_missing_optional_values_stay_and_missing_required_values_are_an_error(checkpoint: Path) -> None:
    planner = SafePlanner(optional=lambda key: key in ("train_state.new", "train_state.step"))
    loaded: dict[str, Any] = {"train_state": {"step": 0, "new": 7}}
    load(checkpoint, loaded, planner)
    assert loaded == {"train_state": {"step": 3, "new": 7}}
    with pytest.raises(CheckpointException, match="other"):
        load(checkpoint, {"train_state": {"step": 0, "other": 7}})


def test_dtypes_of_every_state_can_be_read(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool)
    state = {str(kind): torch.zeros(2, 2, dtype=kind) for kind in kinds}
    dcp.save(state, storage_writer=SummingWriter(tmp_path / "step-1", 1), no_dist=True)
    assert set(SafeReader(tmp_path / "step-1").read_metadata().state_dict_metadata) == set(state)
