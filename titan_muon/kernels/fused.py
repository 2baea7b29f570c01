"""`fused=True`: Triton kernels for momentum and update, which read and write each tensor once."""

# [Note: fused calls]
# - One kernel launch runs a call. A program of the kernel finds its tensor and elements in a table on the device.
# - A table has the addresses of tensors. Gradients and buffers may move between steps. Then the step sends a new table
#   from pinned memory, which PyTorch's host allocator keeps until the copy has run. So the host does not wait.
# - A table is kept, by its contents and stream, as long as each step uses it.
# - Kernels compute in float32 and round once, so bits differ from the foreach operators'. Draws are equal.

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms import algorithm_of
from ..engine.faults.skip import Scaling
from ..engine.step.algorithm import Algorithm, Decorated, Group, PlanContext, Tensors
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.muon import MuonAlgorithm
from ..engine.step.rounding import seed_of, wrapped
from ..engine.tensors.storage import STEP
from ..options import MuonOptions, OptionError
from .measured import measured_choices

if TYPE_CHECKING:
    from ..engine.step.context import StepContext
    from ..engine.step.foreach import MomentumCall, UpdateCall
    from ..engine.step.gradients import StepGradients
    from .symmetric import Launch

BLOCK = 2048
"""Elements of a program."""
ALIGNMENT = 16
"""Elements, and bytes of an address, for accesses of 16 bytes at once."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Row = tuple[int, ...]
"""Of the table: elements, columns, count of the first draw; then address, row stride and column stride by tensor."""


class Table(NamedTuple):
    """The tensors of a launch.

    Attributes:
        tiles: (programs, 2) int32: row of `tensors`, and number of the program within this row.
        tensors: (rows, words) int64.
        flat: whether all tensors are contiguous.
        aligned: whether 16 elements are adjacent and aligned everywhere.
    """

    tiles: Tensor
    tensors: Tensor
    flat: bool
    aligned: bool

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Table:
        places = [row[3:] for row in rows]
        strides = [(row[1], *pair) for row in rows for pair in zip(row[4::3], row[5::3], strict=True)]
        flat = all((down, across) == (cols, 1) for cols, down, across in strides)
        sizes = [row[0] for row in rows] if flat else [number for cols, down, _ in strides for number in (cols, down)]
        numbers = [*sizes, *(address for place in places for address in place[::3])]
        aligned = all(across == 1 for *_, across in strides) and all(number % ALIGNMENT == 0 for number in numbers)
        counts = torch.tensor([-(-row[0] // BLOCK) for row in rows], device="cpu")
        owners = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), counts)
        starts = (counts.cumsum(0) - counts)[owners]
        tiles = torch.stack([owners, torch.arange(len(owners), device="cpu") - starts], dim=1).int()
        return cls(tiles, torch.tensor(rows, dtype=torch.int64, device="cpu"), flat, aligned)


def rows_of(lists: Sequence[Tensors], firsts: Sequence[int]) -> tuple[Row, ...]:
    """The rows of a table for lists of equally many (rows, cols) tensors."""
    return tuple(
        (
            tensors[0].numel(),
            tensors[0].size(1),
            wrapped(first),
            *(word for tensor in tensors for word in (tensor.data_ptr(), *tensor.stride())),
        )
        for first, *tensors in zip(firsts, *lists, strict=True)
    )


def momentum_launch(
    table: Table, lists: Sequence[Tensors], decay: float, scaling: Scaling | None, *, nesterov: bool
) -> Launch:
    """`lists`: momentum, gradients and packed tensors, or no packed tensors."""
    from .passes import momentum

    dtypes = _dtypes(("MOMENTUM", "GRAD", "PACKED"), (*lists, lists[0])[:3])
    flags = {"PACKS": len(lists) == 3, "NESTEROV": nesterov}
    inverse = None if scaling is None else scaling.inverse
    flags |= {"SKIPS": scaling is not None, "SCALED": inverse is not None}
    skipped = None if scaling is None else scaling.skipped
    return _launch(momentum, table, (1 - decay, decay, skipped, inverse), dtypes | flags)


def update_launch(
    table: Table,
    lists: Sequence[Tensors],
    factor: float | Tensor,
    rate: float | Tensor,
    seed: int | None,
    scaling: Scaling | None,
    *,
    cautious: bool,
) -> Launch:
    """`lists`: parameters and updates. `seed`: of stochastic rounding, or None."""
    from .passes import update

    flags = {"CAUTIOUS": cautious, "STOCHASTIC": seed is not None, "IN_MEMORY": isinstance(rate, Tensor)}
    options = _dtypes(("PARAM", "UPDATE"), lists) | flags | {"SKIPS": scaling is not None}
    skipped = None if scaling is None else scaling.skipped
    return _launch(update, table, (factor, rate, 0 if seed is None else seed, skipped), options)


def _dtypes(names: Sequence[str], lists: Sequence[Tensors]) -> dict[str, Any]:
    import triton.language as tl

    return {
        name: getattr(tl, str(tensors[0].dtype).removeprefix("torch."))
        for name, tensors in zip(names, lists, strict=True)
    }


def _launch(kernel: Any, table: Table, numbers: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    from .symmetric import Launch

    # Single elements take more registers for addresses than vectors.
    options |= {"FLAT": table.flat, "ALIGNED": table.aligned, "BLOCK": BLOCK, "num_warps": 4 if table.aligned else 8}
    return Launch(kernel, (len(table.tiles),), (table.tiles, table.tensors, *numbers), options)


def usable(kind: str) -> bool:
    """Whether Triton runs on a type of device. Triton's interpreter runs on the CPU alone."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return find_spec("triton") is not None and kind == ("cpu" if interpreted else "cuda")


class Fused(Decorated):
    """Runs each element-wise call as one kernel, see [Note: fused calls]. The innermost decorator."""

    reads_flag = True

    def __init__(self, inner: Algorithm, tables: Tables) -> None:
        super().__init__(inner)
        self._tables = tables

    def _of(self, call: MomentumCall | UpdateCall) -> MuonAlgorithm:
        algorithm = self.inner.for_parameter(call.parts[0].parameter)
        assert isinstance(algorithm, MuonAlgorithm), "`check` accepts algorithms with Muon's arithmetic"
        return algorithm

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        decay, nesterov = self._of(call).decay(call.group), call.group["nesterov"]
        lists = [momentum, grads, call.packed] if call.packed else [momentum, grads]
        # A kernel has one layout of rows, so that the place of an absent tensor is filled.
        table = self._tables.on_device([momentum, grads, call.packed or momentum], [0] * len(momentum))
        momentum_launch(table, lists, decay, self._tables.scaling, nesterov=nesterov).run()

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        muon = self._of(call)
        lr, decay = muon.rates(call.group)
        cautious = self.options.cautious
        factor, rate = -lr * decay if cautious else 1 - lr * decay, -lr * muon.factor(call)
        firsts = [0] * len(params) if call.chunk is None else call.chunk.firsts
        seed = None if call.chunk is None else seed_of(call.group[STEP])
        table = self._tables.on_device([params, call.updates], firsts)
        update_launch(table, [params, call.updates], factor, rate, seed, self._tables.scaling, cautious=cautious).run()


class Tables:
    """The tables on the device, kept as long as each step uses them, and the flag of the step. A hook of the step."""

    def __init__(self, rank: StepContext) -> None:
        self._rank = rank
        self._tables: dict[Any, Table] = {}
        self._last: dict[Any, Table] = {}
        self.scaling: Scaling | None = None

    def begin(self, gradients: StepGradients) -> None:
        self.scaling = gradients.scaling
        self._last, self._tables = self._tables, {}

    def end(self) -> None:
        """Nothing: the next step looks up this step's tables."""

    def on_device(self, lists: Sequence[Tensors], firsts: Sequence[int]) -> Table:
        """The table of these tensors. Tensors of a stream are reused on this stream, so the stream is in the key."""
        rows = rows_of(lists, firsts)
        key = (torch.get_device_module(self._rank.device).current_stream(), rows)
        table = self._tables.get(key) or self._last.get(key)
        if table is None:
            host = Table.of(rows)
            table = host._replace(tiles=self._rank.on_device(host.tiles), tensors=self._rank.on_device(host.tensors))
        self._tables[key] = table
        return table


def has_kernels(algorithm: Algorithm) -> bool:
    """Whether the algorithm has Muon's element-wise arithmetic."""
    methods = ("before_gather", "after_return", "add", "factor")
    return all(getattr(type(algorithm), n) is getattr(MuonAlgorithm, n) for n in methods)


class FusedFeature(Feature):
    """Kernels for momentum and update."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for an algorithm with other arithmetic, wider weights, and a device without Triton."""
        options, device = context.options, context.device
        if not has_kernels(algorithm_of(options)):
            problem = f"= True has no kernels for algorithm = {options.algorithm!r}, but for 'muon' and 'normuon'"
            raise OptionError("fused", f"{problem}; set False")
        # A dry run may plan for GPUs that this machine lacks.
        if not usable(device) and (device == "cpu" or torch.accelerator.is_available()):
            remedy = "install Triton and train on a GPU, or set False (on CPUs, TRITON_INTERPRET=1 runs tests)"
            raise OptionError("fused", f"= True needs Triton, which does not run on {device}; {remedy}")
        wrong = [fqn for fqn, tensor in context.named if tensor.dtype not in DTYPES]
        if wrong:
            problem = f"= True computes in float32, and these parameters are wider: {', '.join(wrong[:5])}; set False"
            raise OptionError("fused", problem)

    def decorate(self, parts: BuiltStep) -> None:
        tables = Tables(parts.rank)
        parts.algorithm = Fused(parts.algorithm, tables)
        parts.hooks.append(tables)


def with_fused(
    options: MuonOptions, device: torch.device, tensors: Sequence[Tensor], groups: Sequence[Group] = ()
) -> MuonOptions:
    """The options with `fused = "auto"` decided: by the measurement of this GPU, if the kernels take the tensors."""
    algorithm = algorithm_of(options, groups)
    takes = usable(device.type) and all(tensor.dtype in DTYPES for tensor in tensors)
    takes = takes and all(has_kernels(algorithm.for_parameter(number)) for number in range(len(tensors)))
    return replace(options, fused=measured_choices(device).fused and takes)
