"""A CUDA device computes the CPU's results, up to rounding. Ranks on a GPU: `make gpu CALL=3`.

Each test also runs on the CPU, and on fake CUDA tensors: without numbers, but with shapes, dtypes, devices, and an
error for a host wait. Tests of fake tensors alone need no GPU.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.accuracy import relative_error
from benchmarks.rehearsal.fake_gpu import FakeGpu, fake_gpu, fake_rank
from benchmarks.rehearsal.recorder import MATRIX_PRODUCTS, Operations
from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.orthogonalize import Method, frobenius_norms, iterate, iteration, orthogonalize, zero_nonfinite_
from titan_muon.engine.orthogonalize.newton_schulz import plain
from titan_muon.engine.tensors.dtensor import local
from titan_muon.kernels.dispatch import product_of
from titan_muon.owned import own

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
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
FAKE_PARAM = pytest.param(FAKE, marks=needs_cuda_build, id=FAKE.name)
CUDA_PARAM = pytest.param(CUDA, marks=needs_gpu, id=CUDA.name)
KERNELS_PARAM = pytest.param(CUDA, marks=(*needs_gpu, needs_triton), id=CUDA.name)
on_every_device = pytest.mark.parametrize("target", [pytest.param(CPU, id=CPU.name), FAKE_PARAM, CUDA_PARAM])

JORDAN = iteration("keller_jordan", 5, 1e-7)
SHAPES = [(1, 256, 256), (3, 128, 512), (2, 512, 128), (1, 33, 70)]
METHODS = [Method("standard", dtype) for dtype in ("bfloat16", "float16", "float32")]
METHODS += [Method("gram", "float16", (2,)), Method("gram", "float32", (2,)), Method("reference", "bfloat16")]
TOLERANCES = {"bfloat16": 0.15, "float16": 0.02, "float32": 2e-4}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_every_device
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalization_approximates_float64_on_the_cpu(
    shape: tuple[int, int, int], method: Method, target: Target
) -> None:
    stack = random(*shape).bfloat16().float()
    placed = target.placed(stack)
    with target.active():
        result = orthogonalize(placed, JORDAN, method)
    dtype = torch.bfloat16 if method.algorithm == "reference" else torch.float32
    assert (result.device.type, result.dtype, result.shape) == (target.device.type, dtype, shape)
    if not target.fake:
        expected = iterate(stack.double(), JORDAN.steps, JORDAN.eps, torch.float64)
        assert relative_error(result.cpu(), expected).max() < TOLERANCES[method.dtype]


@on_every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nonfinite_matrices_are_set_to_zero(dtype: torch.dtype, target: Target) -> None:
    stack = random(3, 8, 6).to(dtype)
    stack[1, 2, 3] = math.nan
    placed = target.placed(stack)
    with target.active():
        broken = torch.zeros(3, dtype=torch.bool, device=target.device)
        zero_nonfinite_(placed, frobenius_norms(placed, torch.float32), broken)
    if not target.fake:
        stack[1] = 0
        assert broken.tolist() == [False, True, False]
        assert torch.equal(placed.cpu(), stack)


@pytest.mark.parametrize("target", [KERNELS_PARAM])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 256, 256), (3, 128, 512), (2, 512, 128), (2, 400, 272), (1, 16, 48)], ids=str)
def test_the_triton_kernel_makes_the_products_of_the_matrix_library(
    shape: tuple[int, int, int], dtype: torch.dtype, target: Target
) -> None:
    """On a GPU alone: a fake tensor has no address to give to a kernel."""
    count, rows, cols = shape
    x = random(count, rows, cols).to(target.device, dtype) / cols**0.5
    product, expected = (torch.empty(count, rows, rows, dtype=dtype, device=target.device) for _ in range(2))
    triton = product_of("triton")
    triton(x, x.mT, out=product)()
    plain(x, x.mT, out=expected)()
    assert relative_error(product, expected).max() < 0.01
    assert torch.equal(product, product.mT)


def trained(target: Target, orthogonalize: str, *, steps: int = 3, **changed: object) -> dict[str, Tensor]:
    """Parameters and momenta after some steps of Muon in one process, with another rate in each."""
    shapes = {"wide": (24, 60), "tall": (60, 24), "experts": (3, 16, 40)}
    options = {"orthogonalize": orthogonalize, "ns_dtype": "float32", "wire_dtype": "float32"} | changed
    with target.active(syncs=True):
        params = {name: nn.Parameter(target.placed(random(*shape))) for name, shape in shapes.items()}
        optimizer = Muon(params.items(), **muon_keywords(lr=0.02, **options)).build()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        with target.active(syncs=True):
            for index, param in enumerate(params.values()):
                param.grad = target.placed(random(*param.shape, seed=10 * step + index + 1))
        with target.active():
            optimizer.step()
    with target.active(syncs=True):
        optimizer.close()
    momenta = {f"{name}: momentum": optimizer.state[param]["momentum_buffer"] for name, param in params.items()}
    return {name: value.detach() for name, value in {**params, **momenta}.items()}


@on_every_device
@pytest.mark.parametrize("orthogonalize", ["standard", "gram", "auto"])
def test_muon_in_a_single_process_equals_the_cpu_result(orthogonalize: str, target: Target) -> None:
    expected = trained(CPU, orthogonalize)
    for name, param in trained(target, orthogonalize).items():
        assert (param.device.type, param.dtype) == (target.device.type, torch.float32), name
        assert param.shape == expected[name].shape, name
        assert target.fake or relative_error(param.cpu(), expected[name]).max() < 1e-4, name


@pytest.mark.parametrize("target", [KERNELS_PARAM])
def test_the_fused_kernels_train_like_the_foreach_operators(target: Target) -> None:
    """On a GPU alone, without a host wait. `make kernels` runs the kernels under Triton's interpreter."""
    expected = trained(target, "standard")
    for name, weight in trained(target, "standard", fused=True).items():
        assert relative_error(weight, expected[name]).max() < 1e-5, name


@pytest.mark.parametrize("target", [KERNELS_PARAM])
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamuon"])
def test_captured_steps_have_the_bits_of_eager_steps(target: Target, algorithm: str) -> None:
    """No GPU has run this yet. Recorded steps replay on the CPU: tests/unit/features/test_graph_replay.py."""
    eager, captured = (
        trained(target, "auto", steps=20, algorithm=algorithm, fused=True, cuda_graph=on) for on in (False, True)
    )
    assert all(torch.equal(captured[name], eager[name]) for name in eager)


@needs_cuda_build
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (5, 8)])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "all_gather_reduce_scatter"])
def test_every_exchange_steps_on_fake_gpus_without_a_wait(rank: int, world: int, exchange: str) -> None:
    with fake_gpu(), fake_rank(world, rank):
        mesh = init_device_mesh("cuda", (world,))
        params = {}
        for name, shape in {"wide": (24, 60), "uneven": (13, 18), "experts": (8, 16, 40)}.items():
            whole = torch.empty(shape, device="cuda")
            params[name] = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
            params[name].grad = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        optimizer = Muon(params.items(), **muon_keywords(lr=0.02, exchange=exchange)).build()
        for _ in range(2):
            with no_sync(torch.device("cuda")):
                optimizer.step()
        optimizer.close()


@pytest.mark.parametrize("target", [FAKE_PARAM, CUDA_PARAM])
def test_a_target_detects_a_wait_of_the_host(target: Target) -> None:
    """So the tests above notice a waiting step."""
    placed = target.placed(random(2, 2))
    with target.active(), pytest.raises(RuntimeError):
        placed.sum().item()


# Fake CUDA tensors alone, without a GPU


@pytest.fixture(autouse=True)
def _as_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


def test_a_momentum_loaded_on_the_host_moves_to_the_parameters_device() -> None:
    """As after torch.load(..., map_location="cpu")."""
    with fake_gpu():
        param = nn.Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)]).build()
        state = muon.state_dict()
        state["state"][0]["momentum_buffer"] = torch.zeros(8, 4)
        muon.load_state_dict(state)
        assert muon.state[param]["momentum_buffer"].device == param.device
        param.grad = torch.empty(8, 4, device="cuda")
        muon.step()


def test_a_step_in_the_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu():
        param = nn.Parameter(torch.empty(8, 4, device="cuda"))
        muon = Muon([("w", param)]).build()
        param.grad = torch.empty(8, 4, device="cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            ValueError, match=r"^Muon\.step cannot be captured in a CUDA graph, .* one launch, after it$"
        ):
            muon.step()
        monkeypatch.undo()
        muon.step()


@pytest.mark.parametrize("build", [Muon, pytest.param(AdamW, marks=needs_cuda_build)])
def test_parameters_of_fsdp_on_the_host_are_updated_on_the_device(build: Any) -> None:
    """Like any user's: only CPUOffloadPolicy moves the parameters to the host."""
    with fake_gpu() as gpu, fake_rank(2, 0):
        model = nn.Linear(64, 64, bias=False, device="cuda")
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
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False, device="cuda") for _ in range(2)))
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
        layer = nn.Linear(8, 8, bias=False, device="cuda")
        own(layer, mesh=init_device_mesh("cuda", (1,)), params=[layer.weight], offload_policy=CPUOffloadPolicy())
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        (param,) = layer.parameters()
        assert local(param).device.type == local(param.grad).device.type == "cpu"
        places = [tensor.data_ptr() for tensor in pinned]
        assert places == [local(param).data_ptr(), local(param.grad).data_ptr()]
