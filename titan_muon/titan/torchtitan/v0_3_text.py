"""TorchTitan 0.3's loader of Hugging Face text, with a state of plain data. The import of `datasets` takes seconds."""

import json
from dataclasses import dataclass
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from titan_muon.titan.storage.reader import plain_pickle


class HFTextLoader(HuggingFaceTextDataLoader):
    """Saves its state as JSON. TorchTitan's saves a pickle, whose load runs any code."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    def state_dict(self) -> dict[str, Any]:
        state = StatefulDataLoader.state_dict(self)
        return {self._rank_id: json.dumps(state), "world_size": self.dp_world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for a state that is neither JSON nor a pickle of plain data."""
        saved = state_dict[self._rank_id]
        try:
            # Earlier versions saved TorchTitan's pickle.
            state = dict(plain_pickle(saved) if isinstance(saved, bytes) else json.loads(saved))
        except Exception as error:
            raise ValueError(
                f"the checkpoint's state of the data loader cannot be read ({type(error).__name__}: {error}); set "
                'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning'
            ) from error
        StatefulDataLoader.load_state_dict(self, state)
