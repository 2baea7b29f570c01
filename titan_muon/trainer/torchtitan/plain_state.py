"""State of TorchTitan's text loaders as JSON. TorchTitan saves a pickle or nested values of a library."""

import json
from abc import abstractmethod
from typing import Any


class PlainState:
    """A loader of Hugging Face text whose `state_dict` holds a text for each data-parallel rank.

    `ranks`: number of data-parallel ranks. Subclasses give the position in the text.
    """

    _rank_id: str
    ranks: int

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Place of the next batch, of numbers, texts and containers."""

    @abstractmethod
    def go_to(self, position: dict[str, Any]) -> None:
        """Continue at a saved position."""

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: json.dumps(self.position()), "world_size": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for a state that is not JSON."""
        saved = state_dict[self._rank_id]
        try:
            position = dict(json.loads(saved))
            if position.keys() != self.position().keys():
                raise ValueError("another loader saved it, such as that of another version of TorchTitan")
            self.go_to(position)
        except Exception as error:
            raise ValueError(
                f"the checkpoint's state of the data loader cannot be read ({type(error).__name__}: {error}); set "
                'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning'
            ) from error
