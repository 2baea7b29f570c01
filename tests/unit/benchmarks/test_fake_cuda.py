"""GPU-only behaviour on fake CUDA tensors, without a GPU."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import Parameter

from benchmarks.rehearsal.fake_gpu import fake_gpu, fake_rank
from benchmarks.rehearsal.recorder import MATRIX_PRODUCTS, Operations
from titan_muon import Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.dtensor import local
from titan_muon.owned import own

needs_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of PyTorch, with or without a GPU: make newest"
)


@pytest.fixture(autouse=True)
def _as_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


def test_a_momentum_loaded_on_the_host_moves_to_the_parameters_device() -> None:
    """As after torch.load(..., map_location="cpu")."""
    with fake_gpu():
        param = Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)]).build()
        state = muon.state_dict()
        state["state"][0]["momentum_buffer"] = torch.zeros(8, 4)
        muon.load_state_dict(state)
        assert muon.state[param]["momentum_buffer"].device == param.device
        param.grad = torch.empty(8, 4, device="cuda")
        muon.step()


def test_a_step_in_the_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu():
        param = Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)]).build()
        param.grad = torch.empty(8, 4, device="cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            ValueError, match=r"^Muon\.step cannot be captured in a CUDA graph, .* one launch, after it$"
        ):
            muon.step()
        monkeypatch.undo()
        muon.step()


@pytest.mark.parametrize("build", [Muon, pytest.param(AdamW, marks=needs_build)])
def test_parameters_of_fsdp_on_the_host_are_updated_on_the_device(build: Any) -> None:
    """Like any user's: only CPUOffloadPolicy moves the parameters to the host."""
    with fake_gpu() as gpu, fake_rank(2, 0):
        model = torch.nn.Linear(64, 64, bias=False, device="cuda")
        fully_shard(model, mesh=init_device_mesh("cuda", (2,)), offload_policy=CPUOffloadPolicy())
        (param,) = model.parameters()
        assert param.to_local().device.type == "cpu"
        optimizer = build(model.named_parameters())
        param.grad = torch.zeros_like(param)
        gpu.syncs.clear()
        with Operations() as operations:
            optimizer.step()
        assert MATRIX_PRODUCTS & operations.counts.keys() or build is not Muon
        averages = [state for name, state in optimizer.state[param].items() if name != "step"]
        assert {local(tensor).device.type for tensor in (*averages, param)} == {"cpu"}
        assert gpu.syncs[-1] == "cuda.synchronize", "for the parameter, which the host may read next"
        assert {*gpu.syncs[:-1]} <= {"Event.synchronize"}, "no copy is waited for, and the last step's faults are there"
        # Two transfers bring all four tensors of AdamW at once.
        assert operations.counts["copy_"] >= (3 if build is Muon else 4)


def test_parameters_partly_on_the_host_are_refused() -> None:
    with fake_gpu(), fake_rank(1, 0):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False, device="cuda") for _ in range(2)))
        mesh = init_device_mesh("cuda", (1,))
        fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(model[1], mesh=mesh)
        with pytest.raises(
            ValueError, match=r"1\.weight: is on cuda:0, and offload = 'parameters' takes what is on the"
        ):
            Muon(model.named_parameters()).build()


def test_owned_parameters_and_gradients_are_in_pinned_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    pin, empty_like = torch.Tensor.pin_memory, torch.empty_like

    def pins(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(copy := pin(tensor))
        return copy

    def makes(like: torch.Tensor, **options: Any) -> torch.Tensor:
        buffer = empty_like(like, **options)
        if options.get("pin_memory"):
            pinned.append(local(buffer))
        return buffer

    monkeypatch.setattr(torch.Tensor, "pin_memory", pins)
    monkeypatch.setattr(torch, "empty_like", makes)
    with fake_gpu(), fake_rank(1, 0):
        layer = torch.nn.Linear(8, 8, bias=False, device="cuda")
        own(layer, mesh=init_device_mesh("cuda", (1,)), params=[layer.weight], offload_policy=CPUOffloadPolicy())
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        (param,) = layer.parameters()
        assert local(param).device.type == local(param.grad).device.type == "cpu"
        places = [tensor.data_ptr() for tensor in pinned]
        assert places == [local(param).data_ptr(), local(param.grad).data_ptr()]
