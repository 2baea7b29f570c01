"""TorchTitan's loader of Hugging Face text. The import of `datasets` takes seconds."""

import json
from dataclasses import dataclass
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader


class HFTextLoader(HuggingFaceTextDataLoader):
    """Saves a rank's state as JSON. TorchTitan's is a pickle, whose load runs any code."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    def state_dict(self) -> dict[str, Any]:
        position = json.dumps(StatefulDataLoader.state_dict(self))
        return {self._rank_id: position, "world_size": self.dp_world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for a state that is not JSON."""
        try:
            position = dict(json.loads(state_dict[self._rank_id]))
            if position.keys() != StatefulDataLoader.state_dict(self).keys():
                raise ValueError("another loader saved it, such as that of another version of TorchTitan")
            StatefulDataLoader.load_state_dict(self, position)
        except Exception as error:
            raise ValueError(
                f"the checkpoint's state of the data loader cannot be read ({type(error).__name__}: {error}); set "
                'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning'
            ) from error
