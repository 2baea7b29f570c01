"""Reads checkpoints without running code: pickles may name only classes on an allow-list."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import PosixPath, PurePosixPath
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


METADATA: Mapping[tuple[str, str], Any] = {
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
"""Objects that `.metadata` may name, by module and name."""


class RefusedError(pickle.UnpicklingError):
    """A pickle names a class or function outside of the allow-list."""


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Path moved within the standard library in Python 3.13.
        key = ("pathlib" if module == "pathlib._local" else module, name)
        if key not in METADATA:
            raise RefusedError(f"it names {module}.{name}, which no checkpoint needs")
        return _constructor(METADATA[key])


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
    """PyTorch's reader with an allow-list for `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _SafeUnpickler(file).load()
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
