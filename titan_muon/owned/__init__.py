"""The `owned` placement: each matrix is stored whole on a single rank, and an optimizer step needs no communication.

Based on DMuon and TorchTitan's FlexShard (pytorch/torchtitan#3502); works beside FSDP2 and on every mesh.
"""

from .own import own
from .owners import Owners
from .param import is_owned
from .state_dict import full_state_dict, gather, load_full_state_dict

__all__ = ["Owners", "full_state_dict", "gather", "is_owned", "load_full_state_dict", "own"]
