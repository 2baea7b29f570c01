"""TorchTitan's loader of Hugging Face text. The import of `datasets` takes seconds."""

from dataclasses import dataclass
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from titan_muon.trainer.torchtitan.plain_state import PlainState


class HFTextLoader(PlainState, HuggingFaceTextDataLoader):
    """Saves its state as JSON. TorchTitan's saves a pickle, whose load runs any code."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return int(self.dp_world_size)

    def position(self) -> dict[str, Any]:
        return dict(StatefulDataLoader.state_dict(self))

    def go_to(self, position: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self, position)
