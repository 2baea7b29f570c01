"""Devices of tests/gpu: the CPU, fake GPUs, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch

from benchmarks.rehearsal.fake_gpu import FakeGpu, fake_gpu

# Tensors of two fake GPUs do not mix, so all tests use one fake GPU.
FAKE_GPU = FakeGpu()


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError (PyTorch's) where the host waits for a GPU in this context."""
    if device.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True)
class Target:
    """A device, and whether its tensors are fake: with a shape, a dtype and a device, but without numbers."""

    name: str
    device: torch.device
    fake: bool = False

    def __str__(self) -> str:
        return self.name

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on the target's device, without values on a fake device."""
        if self.fake:
            with fake_gpu(FAKE_GPU):
                return torch.empty_like(tensor, device=self.device)
        return tensor.to(self.device, copy=True)

    @contextmanager
    def active(self, *, syncs: bool = False) -> Iterator[None]:
        """Run the block on the target. Unless `syncs`, the host must not wait for the device."""
        with fake_gpu(FAKE_GPU) if self.fake else nullcontext(), nullcontext() if syncs else no_sync(self.device):
            yield


CPU = Target("cpu", torch.device("cpu"))
FAKE = Target("fake cuda", torch.device("cuda"), fake=True)
CUDA = Target("cuda", torch.device("cuda"))
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of PyTorch, with or without a GPU: make newest"
)
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
FAKE_PARAM = pytest.param(FAKE, marks=needs_cuda_build, id=FAKE.name)
CUDA_PARAM = pytest.param(CUDA, marks=needs_gpu, id=CUDA.name)
EVERY = [pytest.param(CPU, id=CPU.name), FAKE_PARAM, CUDA_PARAM]
on_every_device = pytest.mark.parametrize("target", EVERY)
