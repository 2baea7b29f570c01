"""`state_dtype="int8"`: momentum in 8 bits."""

# [Note: 8-bit momentum]
# - A block is 64 elements of a row: int8 numbers with a float32 scale. The largest magnitude is 127 scales. Blocks do
#   not cross shards, so every layout stores the same blocks, and checkpoints reshard without rounding.
# - A step decodes the momentum of a call to float32, and encodes the result. Most changes of an element are smaller
#   than a unit and lost by rounding to nearest, so rounding is stochastic.
# - The draws are a hash of the step, the parameter's name and the element's place in the shard. So replicas stay equal,
#   and a resume needs only the step count. A decoded and unchanged element is encoded to the same number.

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..engine.layout.types import Parameter
from ..engine.state.states import new_state
from ..engine.step.algorithm import Algorithm, Decorated, PlanContext, Tensors
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import MomentumCall, StepContext
from ..engine.tensors.dtensor import from_local, local
from ..engine.tensors.storage import STEP
from ..kernels.draws import hash_counts
from ..options import OptionError

SCALES = "momentum_scale"
SCALE_BLOCK = 64
LARGEST_NUMBER = 127
MARGIN = 2.0**-10
"""Draws are from MARGIN to 1 - MARGIN, so that encoding does not change a decoded number."""


def _cut_blocks(tensor: Tensor, planned: Parameter) -> str:
    """Why 8-bit blocks of a parameter would cross shards or matrices; empty if not."""
    cut = 1
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.mesh.shape, strict=True):
            cut *= size if isinstance(placement, Shard) and placement.dim == tensor.ndim - 1 else 1
    columns = tensor.shape[-1]
    if planned.stack.interleaved:
        return f"{planned.fqn} has matrices that share rows"
    if (cut > 1 or planned.stack.row_dims < tensor.ndim - 1) and columns % (SCALE_BLOCK * cut):
        return f"{planned.fqn} has {columns} columns on {cut} ranks, which cut blocks"
    return ""


class EightBit(Decorated):
    """Decodes the momentum of each call and encodes the result. The scales are states of the parameters."""

    def __init__(self, inner: Algorithm, rank: StepContext) -> None:
        super().__init__(inner)
        self._params, self._storage = rank.params, rank.storage
        self._keys = [zlib.crc32(trained.fqn.encode()) for trained in rank.params]
        self._scales: list[Tensor] = []
        for trained, storage in zip(rank.params, rank.storage, strict=True):
            if SCALES not in trained.state:
                trained.state[SCALES] = new_scales(trained.param)
            scales, rows = local(trained.state[SCALES]), storage.param.size(0)
            self._scales.append(scales.view(rows, scales.numel() // rows if rows else 0))

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        scales = [part.of(self._scales[part.parameter]) for part in call.parts]
        wide = [decoded(*pair) for pair in zip(momentum, scales, strict=True)]
        super().before_gather(call, wide, grads)
        if momentum is not call.momentum:
            # A copy of the numbers, and the scales are not to change.
            return
        for part, new, numbers, factors in zip(call.parts, wide, momentum, scales, strict=True):
            key = self._keys[part.parameter] + part.start * self._storage[part.parameter].param.size(1)
            encode(new, numbers, factors, key, self._params[part.parameter].group[STEP])


def new_scales(parameter: Tensor) -> Tensor:
    """Scales of zeros, placed like the parameter: a scale for each block of a row."""
    tensors = local(parameter), parameter
    stored, whole = (torch.empty(*t.shape[:-1], -(-t.shape[-1] // SCALE_BLOCK), device="meta") for t in tensors)
    if isinstance(parameter, DTensor):
        stored = from_local(stored, parameter.device_mesh, parameter.placements, whole)
    return new_state(parameter, torch.float32, "none", stored)


def decoded(numbers: Tensor, scales: Tensor) -> Tensor:
    """Float32 momentum (rows, cols): a view of whole blocks, from int8 numbers and scales (rows, blocks)."""
    rows, cols = numbers.shape
    wide = torch.zeros(rows, scales.size(1) * SCALE_BLOCK, dtype=torch.float32, device=numbers.device)
    wide[:, :cols] = numbers
    wide.view(rows, -1, SCALE_BLOCK).mul_(scales[:, :, None])
    return wide[:, :cols]


def encode(momentum: Tensor, numbers: Tensor, scales: Tensor, key: int, step: int) -> None:
    """Write momentum from `decoded` to int8 numbers and scales. Replaces non-finite elements by zero.

    `key`: hash of the parameter and the place of `momentum` in the shard.
    """
    rows, cols = numbers.shape
    wide = momentum.as_strided((rows, scales.size(1), SCALE_BLOCK), (momentum.stride(0), SCALE_BLOCK, 1))
    wide.nan_to_num_(0.0, 0.0, 0.0)
    torch.amax(wide.abs(), dim=2, out=scales)
    scales.div_(LARGEST_NUMBER)
    wide.div_(torch.where(scales > 0, scales, 1.0)[:, :, None])
    wide.add_(draws(wide.shape, key, step, wide.device)).floor_().clamp_(-LARGEST_NUMBER, LARGEST_NUMBER)
    numbers.copy_(wide.view(rows, -1)[:, :cols])


def draws(shape: torch.Size, key: int, step: int, device: torch.device) -> Tensor:
    """Uniform float32 numbers, equal for equal arguments on every device."""
    first = (key + zlib.crc32(str(step).encode())) % 2**31
    bits = torch.arange(first, first + shape.numel(), device=device).to(torch.int32)
    uniform = hash_counts(bits, torch.empty_like(bits)).float().add_(0.5).mul_(2.0**-16)
    return uniform.mul_(1 - 2 * MARGIN).add_(MARGIN).view(shape)


class EightBitFeature(Feature):
    """Momentum in 8 bits."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for momentum on the host or only on the owner, and for matrices that cut blocks."""
        for name, needed in (("offload", "none"), ("state", "replicated")):
            value = getattr(context.options, name)
            if value != needed:
                problem = f"= {value!r} does not take state_dtype = 'int8'; set {needed!r}, or 'bfloat16'"
                raise OptionError(name, problem)
        for (_, tensor), planned in zip(context.named, context.parameters, strict=True):
            if problem := _cut_blocks(tensor, planned):
                text = f"= 'int8' has a scale for {SCALE_BLOCK} columns of a row, and {problem}; set 'bfloat16'"
                raise OptionError("state_dtype", text)

    def decorate(self, parts: BuiltStep) -> None:
        parts.algorithm = EightBit(parts.algorithm, parts.rank)
