"""Reads checkpoints without running code: pickles may name only classes on an allow-list."""

import io
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout


class _Encoding(int):
    """A memory format in place of PyTorch's enumeration, whose members a pickle could change."""

    def __eq__(self, other: object) -> bool:
        return int(self) == getattr(other, "value", other)


Allowed = Mapping[tuple[str, str], Any]
"""Objects that a pickle may name, by module and name."""
METADATA: Allowed = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            dcp_metadata.Metadata,
            dcp_metadata.MetadataIndex,
            dcp_metadata.StorageMeta,
            dcp_metadata.TensorStorageMetadata,
            dcp_metadata.BytesStorageMetadata,
            dcp_metadata.ChunkStorageMetadata,
            dcp_metadata.TensorProperties,
            _StorageInfo,
            torch.Size,
            OrderedDict,
            PosixPath,
            PurePosixPath,
            _get_layout,
        )
    },
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"): _Encoding,
}
"""Allowed in `.metadata`."""


TRIAL = """
import pickle, resource, sys
seconds, memory = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
class Anything:
    __new__ = lambda kind, *args, **keywords: object.__new__(kind)
    __hash__ = lambda self: hash(tuple(vars(self).values()))
    __setitem__ = lambda self, key, value: hash(key)
class Trial(pickle.Unpickler):
    find_class = lambda self, module, name: Anything
try:
    Trial(sys.stdin.buffer).load()
except MemoryError:
    sys.exit(3)
except Exception:
    pass
"""
"""Reads a pickle with stand-ins for classes, as costly to hash as a dataclass, within limits of the process."""
TRIAL_SECONDS, TRIAL_MIB = 2, 256


class RefusedError(pickle.UnpicklingError):
    """A pickle names a class or function outside of the allow-list."""


class _SafeUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        # Path moved within the standard library in Python 3.13.
        key = ("pathlib" if module == "pathlib._local" else module, name)
        if key not in self._allowed:
            raise RefusedError(f"it names {module}.{name}, which no checkpoint needs")
        return _constructor(self._allowed[key])


def check_cost(path: Path) -> None:
    """Raise RefusedError for a pickle that ends a process, or that takes much time or memory for its length.

    The hash of a key of nested tuples can take hours or overflow the stack, and no thread can stop it.
    """
    mebibytes = path.stat().st_size // 2**20
    limits = (TRIAL_SECONDS + mebibytes, (TRIAL_MIB + 64 * mebibytes) * 2**20)
    with path.open("rb") as file:
        trial = [sys.executable, "-I", "-S", "-c", TRIAL, *map(str, limits)]
        code = subprocess.run(trial, stdin=file, stderr=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise RefusedError(
            f"reading its {path.stat().st_size} bytes takes more time, stack or memory than a save needs"
        )


def _constructor(value: Any) -> Any:
    """A class that lives for one pickle and makes what `value` makes; a value without attributes as it is.

    The opcode BUILD sets attributes of any object, so a pickle must not reach a class or function of this process. The
    opcode NEWOBJ needs a class.
    """
    if not callable(value):
        return value

    def make(_: type, *args: Any) -> Any:
        return object.__new__(value) if isinstance(value, type) and is_dataclass(value) else value(*args)

    return type("Constructor", (), {"__new__": make})


class SafeReader(FileSystemReader):
    """PyTorch's reader with an allow-list and a bounded cost for `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        check_cost(Path(self._get_metadata_path(kwargs.get("rank"))))
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _SafeUnpickler(file, METADATA).load()
        assert isinstance(metadata, Metadata), f".metadata holds a {type(metadata).__name__}"
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """PyTorch's planner, for plain data. Optional keys without a saved value keep the current value."""

    def __init__(self, optional: Callable[[str], bool] = lambda key: False) -> None:
        super().__init__()
        self._optional = optional

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = {} if metadata is None else metadata.state_dict_metadata
        self.state_dict = {k: value for k, value in self.state_dict.items() if k in saved or not self._optional(k)}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))
