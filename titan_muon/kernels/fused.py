"""`fused`: the momentum and the update of a bucket as two launches of Triton kernels, on by default on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ..engine.step.algorithm import Algorithm, PlanContext
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import MomentumCall, Rectangle, StepContext, UpdateCall, group_numbers, slot_bytes
from ..engine.step.gradients import StepGradients
from ..engine.step.muon import MuonAlgorithm
from ..engine.step.views import BucketViews
from ..engine.tensors.dtensor import is_host
from ..engine.tensors.storage import STEP
from ..options import MuonOptions, OptionError
from .batches import BatchLaunches, TableLaunch, scratch_of, takes_batch
from .draws import seed_of, wrapped
from .tables import ALIGNMENT, EXCLUDED, MISSING, Row, Table, ViewPlace, address, bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = 2
"""Word of the first gradient. Before are the flag of a skipped step and the factor on the gradients."""
GROUP_WORDS = 6
"""Words of a group and a shape: momentum's weight, momentum, nesterov, decay, rate, seed."""

Kind = tuple[tuple[str, Any], ...]
"""Options of a kernel."""


class Kernels:
    """Two launches for each bucket. A hook that refreshes the vector, see [Note: tables and the vector of a step].

    `views`: the calls of the buckets, with their tensors. `algorithm`: without decorators. `scratch`: memory of the
    iterations, in a step. `dtypes`: of gradients, by parameter; other dtypes have other launches.
    """

    captured = False

    def __init__(self, rank: StepContext, views: Sequence[BucketViews], algorithm: Algorithm) -> None:
        self._rank, self._views, self.algorithm = rank, views, algorithm
        self._cautious = algorithm.options.cautious
        # See [Note: one launch].
        self._copies_unaligned = rank.options.cuda_graph is True
        self._groups, count = group_numbers(rank), len(rank.storage)
        # Sources of the numbers of a group and a shape.
        self._numbers: dict[tuple[int, tuple[int, int]], tuple[Algorithm, UpdateCall]] = {}
        for call in (call for bucket in views for call in bucket.updates):
            parameter = call.parts[0].parameter
            key = self._groups[parameter], call.out_in
            self._numbers.setdefault(key, (algorithm.for_parameter(parameter), call))
        self._flags = GRADIENTS + count
        self._words = {key: self._flags + count + GROUP_WORDS * place for place, key in enumerate(self._numbers)}
        self._storages: dict[UntypedStorage, int] = {}
        planned = (trained.param.grad_dtype for trained in rank.params)
        pairs = zip(planned, rank.params, strict=True)
        self._by_dtypes: dict[tuple[torch.dtype, ...], list[list[TableLaunch]]] = {}
        self._use_dtypes(tuple(dtype or trained.param.dtype for dtype, trained in pairs))
        self._updates = [self._launches("update", map(self._update_rows, bucket.updates)) for bucket in views]
        taken = {
            (view.index, number): (batch, own)
            for view in views
            for number, (_, batch, _) in enumerate(view.batches)
            if takes_batch(rank, batch, own := algorithm.for_parameter(batch.parameters[0]))
        }
        size = max((sum(map(slot_bytes, scratch_of(rank, batch))) for batch, _ in taken.values()), default=0)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=rank.device)
        self._batches = {
            key: BatchLaunches(rank, key[0], *pair, self.scratch, self._stored, self._flags)
            for key, pair in taken.items()
        }
        words = self._flags + count + GROUP_WORDS * len(self._words) + len(self._storages)
        self._vector = torch.zeros(words, dtype=torch.int64, device=rank.device)
        self._copies: list[Tensor] = []
        self._unaligned: list[int] | None = None

    # --- tables ---

    def _launches(self, kernel: str, rows: Iterable[Iterator[tuple[Kind, Row]]]) -> list[TableLaunch]:
        """A launch for the rows of each kind. A bucket has one kind, unless dtypes or alignments differ."""
        kinds: dict[tuple[Kind, bool], list[Row]] = {}
        for kind, row in chain.from_iterable(rows):
            kinds.setdefault((kind, row.aligned), []).append(row)
        made = ((dict(kind), Table.of(alike)) for (kind, _), alike in kinds.items())
        send = self._rank.on_device
        return [TableLaunch(kernel, table.on(send), options) for options, table in made if len(table.tiles)]

    def _use_dtypes(self, dtypes: tuple[torch.dtype, ...]) -> None:
        """Take the launches for gradients of these dtypes, by parameter. A captured step reads its tables again."""
        self.dtypes = dtypes
        if dtypes not in self._by_dtypes:
            made = (self._launches("advance", map(self._momentum_rows, bucket.gathers)) for bucket in self._views)
            self._by_dtypes[dtypes] = list(made)
        self._advances = self._by_dtypes[dtypes]

    def _momentum_rows(self, call: MomentumCall) -> Iterator[tuple[Kind, Row]]:
        gathers = self.algorithm.for_parameter(call.parts[0].parameter).gathering.gather_kernel
        if gathers == "copy" and not call.packed:
            return
        packed, grads = call.packed or call.momentum, call.grads or (None,) * len(call.parts)
        flags = {"PACKS": bool(call.packed), "GATHERS": gathers}
        for part, momentum, blend, fetched in zip(call.parts, call.momentum, packed, grads, strict=True):
            grad = self._gradient(part) if fetched is None else self._stored(fetched)
            dtype = self.dtypes[part.parameter] if fetched is None else fetched.dtype
            kind = {"MOMENTUM": momentum.dtype, "GRAD": dtype, "PACKED": blend.dtype, **flags}
            # A copy has no momentum.
            old = blend if gathers == "copy" else momentum
            yield tuple(kind.items()), self._row(part, old, 0, (self._stored(old), grad, self._stored(blend)))

    def _update_rows(self, call: UpdateCall) -> Iterator[tuple[Kind, Row]]:
        firsts = [0] * len(call.parts) if call.chunk is None else call.chunk.firsts
        flags = {"CAUTIOUS": self._cautious, "STOCHASTIC": call.chunk is not None}
        for part, param, change, first in zip(call.parts, call.params, call.updates, firsts, strict=True):
            kind = {"PARAM": param.dtype, "UPDATE": change.dtype, **flags}
            yield tuple(kind.items()), self._row(part, param, first, (self._stored(param), self._stored(change)))

    def _row(self, part: Rectangle, view: Tensor, first: int, places: tuple[ViewPlace, ...]) -> Row:
        numbers = self._words[self._groups[part.parameter], self._rank.plan.out_in(part.matrix)]
        return Row(view.size(0), view.size(1), numbers, self._flags + part.parameter, first, places)

    def _stored(self, view: Tensor) -> ViewPlace:
        """The place in a storage."""
        first = self._flags + len(self._groups) + GROUP_WORDS * len(self._words)
        base = self._storages.setdefault(view.untyped_storage(), first + len(self._storages))
        return ViewPlace.of(base, view, int(view.storage_offset()), view.itemsize)

    def _gradient(self, part: Rectangle) -> ViewPlace:
        """The place in a contiguous gradient."""
        stored, size = self._rank.storage[part.parameter].param, self.dtypes[part.parameter].itemsize
        view = part.of(stored)
        first = int(view.storage_offset() - stored.storage_offset())
        return ViewPlace.of(GRADIENTS + part.parameter, view, first, size)

    # --- each step ---

    def begin(self, gradients: StepGradients) -> None:
        """Refresh the vector. Other dtypes of gradients than in the step before need other tables."""
        dtypes = tuple(gradients.dtype(number) or old for number, old in enumerate(self.dtypes))
        if dtypes != self.dtypes:
            self._use_dtypes(dtypes)
        grads = [None if grad is None else grad.contiguous() for grad in gradients.grads]
        if self._copies_unaligned:
            grads = [g if g is None or address(g) % ALIGNMENT == 0 else g.clone() for g in grads]
        # Not all gradients, because `release_grads` frees them in the step.
        self._copies = [g for g, given in zip(grads, gradients.grads, strict=True) if g is not None and g is not given]
        flags = [MISSING * (g is None) + EXCLUDED * (n in gradients.excluded) for n, g in enumerate(grads)]
        numbers = [*chain.from_iterable(self._numbers_of(*sources) for sources in self._numbers.values())]
        addresses = [0 if grad is None else address(grad) for grad in grads]
        storages = [address(storage) for storage in self._storages]
        on_host = (0 if isinstance(number, Tensor) else number for number in numbers)
        words = [0, bits(1.0), *addresses, *flags, *on_host, *storages]
        self._unaligned = words if any(word % ALIGNMENT for word in (*addresses, *storages)) else None
        host, floats = torch.tensor(words, dtype=torch.int64, device="cpu"), self._vector.view(torch.float32)
        self._vector.copy_(host if is_host(self._rank.device) else host.pin_memory(), non_blocking=True)
        # A rate in device memory, where the host does not wait for it.
        for word, number in enumerate(numbers, self._flags + len(flags)):
            if isinstance(number, Tensor):
                floats[2 * word].copy_(number)
        if (scaling := gradients.scaling) is not None:
            self._vector[0].copy_(scaling.skipped)
            if scaling.inverse is not None:
                floats[2].copy_(scaling.inverse)

    def _numbers_of(self, own: Algorithm, call: UpdateCall) -> list[int | Tensor]:
        gathering, returning, group = own.gathering, own.returning, call.group
        assert isinstance(gathering, MuonAlgorithm), "see `has_kernels`"
        assert isinstance(returning, MuonAlgorithm), "see `has_kernels`"
        momentum = gathering.decay(group)
        lr, decay = returning.rates(group)
        factor = -lr * decay if self._cautious else 1 - lr * decay
        rates = [n if isinstance(n, Tensor) else bits(n) for n in (factor, -lr * returning.factor(call))]
        seed = wrapped(seed_of(group[STEP])) if STEP in group else 0
        return [bits(1 - momentum), bits(momentum), int(group["nesterov"]), *rates, seed]

    def advance(self, index: int) -> None:
        for launch in self._advances[index]:
            launch.run(self._vector, self._unaligned)

    def orthogonalize(self, index: int, number: int) -> bool:
        batch = self._batches.get((index, number))
        if batch is not None:
            batch.run(self._vector, self._unaligned)
        return batch is not None

    def apply(self, index: int) -> None:
        for launch in self._updates[index]:
            launch.run(self._vector, self._unaligned)

    def end(self) -> None:
        self._copies.clear()


# --- the feature ---


def usable(kind: str) -> bool:
    """Whether Triton runs on a type of device. Triton's interpreter runs only on the CPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return find_spec("triton") is not None and kind == ("cpu" if interpreted else "cuda")


def has_kernels(algorithm: Algorithm) -> bool:
    """Whether kernels have the element-wise arithmetic of an algorithm."""
    kinds, returning = type(algorithm.gathering).__mro__, type(algorithm.returning)
    gathers = next(vars(kind) for kind in kinds if "before_gather" in vars(kind))
    adds = (getattr(returning, name, None) is getattr(MuonAlgorithm, name) for name in ("after_return", "add"))
    return gathers.get("gather_kernel") is not None and all(adds)


def foreach_reason(options: MuonOptions, algorithm: Algorithm, tensors: Sequence[Tensor]) -> str:
    """Why `fused = "auto"` takes PyTorch's operators on a GPU; empty if it takes the kernels."""
    # A plan may be for GPUs that this machine lacks.
    lacks_triton = not usable("cuda") and torch.accelerator.is_available()
    reason = "the package triton is missing" if lacks_triton else _unfit(options, algorithm, tensors)
    return reason and f"momentum and update by PyTorch's operators: {reason}"


def _unfit(options: MuonOptions, algorithm: Algorithm, tensors: Sequence[Tensor]) -> str:
    algorithms = map(algorithm.for_parameter, range(len(tensors)))
    own = next((one.options.algorithm for one in algorithms if not has_kernels(one)), None)
    if own is not None:
        return f"algorithm = {own!r} has element-wise arithmetic of its own"
    if options.state_dtype == "int8":
        return "state_dtype = 'int8' has a momentum of its own"
    return "" if all(tensor.dtype in DTYPES for tensor in tensors) else "parameters are wider than float32"


class FusedFeature(Feature):
    """Kernels for momentum and update."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for other arithmetic, wider weights, and a device without Triton."""
        options, device = context.options, context.device
        if problem := _unfit(options, context.algorithm, [tensor for _, tensor in context.named]):
            raise OptionError("fused", f"= True has no kernels: {problem}; set 'auto'")
        # A dry run may plan for GPUs that this machine lacks.
        if not usable(device) and (device == "cpu" or torch.accelerator.is_available()):
            remedy = "install Triton and train on a GPU, or set 'auto' (on CPUs, TRITON_INTERPRET=1 runs tests)"
            raise OptionError("fused", f"= True needs Triton, which does not run on {device}; {remedy}")

    def decorate(self, parts: BuiltStep) -> None:
        # Before others decorate it.
        self._algorithm = parts.algorithm

    def build(self, parts: BuiltStep, before: BuiltStep | None) -> None:
        with parts.rank.buffers.memory.held(), parts.workspace.held():
            parts.passes = kernels = Kernels(parts.rank, parts.views, self._algorithm)
        parts.workspace.add(kernels.scratch)
        # After the hook that takes the memory of `offload`, whose addresses this one reads.
        parts.hooks.append(kernels)
