"""The main branch's loader of Hugging Face text. The import of `datasets` takes seconds."""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.data import GrainDataLoader

from titan_muon.titan.torchtitan.plain_state import PlainState


class HFTextLoader(PlainState, GrainDataLoader):
    """Saves its state as JSON. TorchTitan's has nested values, which a checkpoint keeps entry by entry."""

    @dataclass(kw_only=True, slots=True)
    class Config(GrainDataLoader.Config):
        pass

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return self._dp_world_size

    def position(self) -> dict[str, Any]:
        return dict(self._iterator.get_state())

    def go_to(self, position: dict[str, Any]) -> None:
        self._iterator.set_state(position)
