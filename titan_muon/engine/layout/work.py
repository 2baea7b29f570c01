"""The work of a matrix in FLOPs and bytes, the rates that decide between methods, and element-wise traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


def standard_flops(rows: int, cols: int, steps: int) -> int:
    """FLOPs of the standard iteration on a rows x cols matrix: the Gram iteration with a restart before each step."""
    return gram_flops(rows, cols, steps, restarts=steps - 1)


def gram_flops(rows: int, cols: int, steps: int, restarts: int, cubic: int = 0) -> int:
    """FLOPs of the iteration on the smaller Gram matrix R = X Xᵀ of a rows x cols matrix.

    For sides m <= n, R and Q X cost 2 m² n each, once per run (`restarts` + 1). A step has four m³ products. The first
    step of a run skips Q Z, the last step skips the next R (two products), and a `cubic` step skips R R.
    """
    m, n = sorted((rows, cols))
    runs = restarts + 1
    return runs * 4 * m * m * n + (4 * steps - 3 * runs - cubic) * 2 * m**3


def standard_elements(rows: int, cols: int) -> int:
    """Elements of the standard iteration: X, the next X, X Xᵀ and the polynomial."""
    m, n = sorted((rows, cols))
    return 2 * m * n + 2 * m * m


def gram_elements(rows: int, cols: int) -> int:
    """Elements of the Gram iteration: X, the next X, R, Q, the polynomial in R and the next R."""
    m, n = sorted((rows, cols))
    return 2 * m * n + 4 * m * m


@dataclass(frozen=True)
class Work:
    """The method of orthogonalizing a matrix, and the cost.

    Attributes:
        method: algorithm and parameters; a batch has matrices of equal shape and method.
        reason: of an automatic choice, else empty.
        batch: most matrices of a batch.
        bytes: working memory per matrix.
        dtype: of the products.
        operators: of PyTorch for a batch.
        state_bytes: of a matrix, on its owner between steps.
        wire_bytes: of an element in transit. Matrices with others travel in other buckets.
        float16_results: whether results stay in float16 until the update, unless a collective adds them.
    """

    method: str
    flops: int
    reason: str = ""
    batch: int = 1
    bytes: int = 0
    dtype: str = "bfloat16"
    operators: int = 20
    state_bytes: int = 0
    wire_bytes: int = 2
    float16_results: bool = False


@dataclass(frozen=True)
class MethodRates:
    """Rates of a device that decide between methods.

    Attributes:
        flops: FLOP/s of large products, by dtype.
        memory: bytes per second, read plus written.
        batch_bytes: smallest batch that fills the device.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    batch_bytes: int = 2**28


# Small batches stay in the caches of a CPU.
CPU = MethodRates("cpu", {"bfloat16": 700e9, "float16": 150e9, "float32": 150e9}, 1e10, 2**24)
"""A core with bfloat16 but no float16 instructions."""
CPU_FLOAT32 = MethodRates("cpu", {"bfloat16": 1.3e9, "float16": 1.3e9, "float32": 63e9}, 1e10, 2**24)
"""A core with AVX2, without vector instructions for 16-bit products."""
GPU = MethodRates("a GPU", {"bfloat16": 650e12, "float16": 650e12, "float32": 50e12}, 2.09e12)
"""A GPU without a named machine: an H100."""


class ElementTraffic(NamedTuple):
    """Bytes read and written for an element of a stored piece, and operators of a call.

    `advance`: advance the momentum and pack. `apply`: decay and update. `lists`: of tensors, with one of each
    parameter. `fused`: a launch takes all pieces of a bucket.
    """

    advance: int
    advance_launches: int
    apply: int
    apply_launches: int
    lists: int = 13
    fused: bool = False


FLOAT32_TRAFFIC = ElementTraffic(30, 3, 26, 3)
"""Of float32 weights and momentum with bfloat16 in transit."""


@dataclass(frozen=True)
class ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Default: float32 weights and momentum.

    `advance` calls change the momentum and `apply` calls the weights: at most so many `elements`, or one row, each with
    so many temporary `bytes`. `finish_bytes`: of the rule, for an element of a whole matrix.
    """

    advance_elements: int = 2**23
    advance_bytes: int = 4
    apply_elements: int = 2**23
    apply_bytes: int = 4
    finish_bytes: int = 0
    traffic: ElementTraffic = FLOAT32_TRAFFIC


FLOAT32_COST = ElementwiseCost()


WorkOf = Callable[[int, int, int], Work]
"""The work of a matrix, by number of the parameter, rows and columns."""


class ElementKind(NamedTuple):
    """The elements of parameters with one dtype."""

    weight_bytes: int
    wire_bytes: int
    is_bfloat16: bool


@dataclass(frozen=True)
class Elements:
    """The elements of the trained parameters on a type of device.

    `rescale_bytes`: temporary bytes of the algorithm's `rescale`, for an element of a matrix.
    """

    kinds: tuple[ElementKind, ...] = ()
    device: str = "cuda"
    rescale_bytes: int = 0


ACCELERATOR_BYTES = 2**25
"""Limit on the wide elements of a call."""
CPU_CHUNK_BYTES = 2**20
"""Limit for a large tensor in a call on a CPU. Smaller chunks have more overhead."""
WIDE_BYTES = 4
"""Bytes of an element in the arithmetic of the momentum."""
ROUNDING_BYTES = 12
"""Of an element that is rounded stochastically: float32 weight, float32 update (then the draw), 4 temporary bytes."""


def chunk_bytes(device: str) -> int:
    """Limit for one tensor in a call. Larger tensors are cut into rows."""
    return CPU_CHUNK_BYTES if device == "cpu" else ACCELERATOR_BYTES
