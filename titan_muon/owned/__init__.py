"""The `owned` placement: a matrix is stored whole on one rank, and an optimizer step communicates nothing.

After DMuon and TorchTitan's FlexShard (pytorch/torchtitan#3502), built beside FSDP2 and for every mesh.
"""

from .own import own
from .owners import Owners
from .param import is_owned
from .state_dict import full_state_dict, gather, load_full_state_dict

__all__ = ["Owners", "full_state_dict", "gather", "is_owned", "load_full_state_dict", "own"]
