"""What only a GPU does, on fake CUDA tensors: a CUDA build of PyTorch makes them without one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from titan_muon import Muon

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of PyTorch, with or without a GPU: make newest"
)


def test_a_momentum_that_was_loaded_on_the_host_comes_to_the_parameters_device() -> None:
    """As after torch.load(..., map_location="cpu")."""
    with FakeTensorMode():
        param = Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)], nonfinite="propagate")
        state = muon.state_dict()
        state["state"][0]["momentum_buffer"] = torch.zeros(8, 4)
        muon.load_state_dict(state)
        assert muon.state[param]["momentum_buffer"].device == param.device
        param.grad = torch.empty(8, 4, device="cuda")
        muon.step()
