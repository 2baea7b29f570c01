"""What a CUDA device computes is what the CPU does, to the rounding of the dtype."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accuracy import relative_error
from titan_muon import Muon
from titan_muon.orthogonalize import Method, iteration, orthogonalize, standard, zero_nonfinite_
from titan_muon.orthogonalize.products import PLAIN
from titan_muon.orthogonalize.symmetric import TritonProducts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
JORDAN = iteration("keller_jordan", 5, 1e-7)
SHAPES = [(1, 256, 256), (3, 128, 512), (2, 512, 128), (1, 33, 70)]
METHODS = [
    Method("standard", "bfloat16"),
    Method("standard", "float16"),
    Method("standard", "float32"),
    Method("gram", "float16", (2,)),
    Method("gram", "float32", (2,)),
    Method("reference", "bfloat16"),
]
TOLERANCES = {"bfloat16": 0.15, "float16": 0.02, "float32": 2e-4}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalization_is_that_of_float64_on_the_cpu(shape: tuple[int, int, int], method: Method) -> None:
    stack = random(*shape).bfloat16().float()
    found = orthogonalize(stack.to(DEVICE), JORDAN, method)
    expected = standard(stack.double(), JORDAN.steps, JORDAN.eps, torch.float64)
    assert found.device.type == DEVICE.type
    assert relative_error(found.cpu(), expected).max() < TOLERANCES[method.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_not_finite_is_set_to_zero(dtype: torch.dtype) -> None:
    stack = random(3, 8, 6).to(DEVICE, dtype)
    stack[1, 2, 3] = math.nan
    expected = stack.clone()
    expected[1] = 0
    assert zero_nonfinite_(stack).tolist() == [False, True, False]
    assert torch.equal(stack, expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 256, 256), (3, 128, 512), (2, 512, 128), (2, 400, 272), (1, 16, 48)], ids=str)
def test_the_triton_kernel_makes_the_products_of_the_matrix_library(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, rows, cols = shape
    x = random(count, rows, cols).to(DEVICE, dtype) / cols**0.5
    found, expected = (torch.empty(count, rows, rows, dtype=dtype, device=DEVICE) for _ in range(2))
    TritonProducts().gram(x, found)
    PLAIN.gram(x, expected)
    assert relative_error(found, expected).max() < 0.01
    assert torch.equal(found, found.mT)


def trained(device: torch.device, orthogonalize: str) -> dict[str, Tensor]:
    """Parameters and momenta after three steps of Muon in one process."""
    shapes = {"wide": (24, 60), "tall": (60, 24), "experts": (3, 16, 40)}
    params = {name: nn.Parameter(random(*shape).to(device)) for name, shape in shapes.items()}
    optimizer = Muon(params.items(), lr=0.02, orthogonalize=orthogonalize, ns_dtype="float32", wire_dtype="float32")
    for step in range(3):
        for index, param in enumerate(params.values()):
            param.grad = random(*param.shape, seed=10 * step + index + 1).to(device)
        optimizer.step()
    momenta = {f"{name}: momentum": optimizer.state[param]["momentum_buffer"] for name, param in params.items()}
    return {name: value.detach().cpu() for name, value in {**params, **momenta}.items()}


@pytest.mark.parametrize("orthogonalize", ["standard", "gram", "auto"])
def test_muon_in_one_process_is_that_of_the_cpu(orthogonalize: str) -> None:
    expected = trained(torch.device("cpu"), orthogonalize)
    for name, found in trained(DEVICE, orthogonalize).items():
        assert relative_error(found, expected[name]).max() < 1e-4, name
