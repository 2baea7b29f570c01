"""The interface of algorithms, and of decorators around an algorithm."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ...options import MuonOptions
from ..layout.types import Parameter
from ..layout.work import Work, WorkOf
from ..orthogonalize import Iteration, Methods
from ..state.states import StateSpec
from ..tensors.process_groups import without_groups
from .foreach import MomentumCall, Tensors, UpdateCall
from .views import Batch

Group = Mapping[str, Any]

WEIGHT_NORM = "weight_norm"
"""Name of the state of `Algorithm.sums_norms`."""


@dataclass(frozen=True)
class PlanContext:
    """The parameters of a plan and their options, before the plan is made. Equal on all ranks.

    Attributes:
        parameters, named: in the plan's order; `named` has (name, parameter), perhaps on the meta device.
        device: type of the device that runs the step.
    """

    options: MuonOptions
    algorithm: Algorithm
    parameters: Sequence[Parameter]
    named: Sequence[tuple[str, Tensor]]
    device: str

    def owned(self) -> list[str]:
        """The names of owned parameters."""
        return [fqn for fqn, tensor in self.named if without_groups(tensor)]

    def part(self, algorithm: Algorithm, numbers: Sequence[int]) -> PlanContext:
        """The context of some parameters with one algorithm."""
        by_parameter = ("parameters", "named")
        chosen: Any = {name: [getattr(self, name)[number] for number in numbers] for name in by_parameter}
        options = replace(self.options, algorithm=algorithm.options.algorithm)
        return replace(self, options=options, algorithm=algorithm, **chosen)


class Algorithm:
    """The function of a whole matrix, and the element-wise work of the holders around it.

    The engine decides where and when each method runs. `before_gather` and `after_return` run on every holder, on parts
    of matrices, and are element-wise, so that any sharding gives the same bits. `update` runs on the owner, on whole
    matrices: `prepare`, `orthogonalize`, then `rescale` for each parameter group.

    Attributes:
        Options: dataclass of the algorithm's own options, for its table in `algorithm_options`.
        own: the options, an instance of `Options`, set after `__init__`.
        whole: whether the algorithm needs whole matrices by parameter group (`Batch.parts`), also without states.
        momentum: whether holders keep a momentum. Otherwise each has an empty tensor in its place.
        wire_dtype: of matrices in transit. None: as the option says.
        counts_steps: whether groups count their steps, under `STEP`.
        temporary_bytes: of `rescale`, for an element of a matrix.
        gathering, returning: the algorithms of `before_gather` and `after_return`; this one unless it is composed.
        parts: the algorithms of a composition or of all parameters; else this one.
        gather_kernel: the kernel with the arithmetic of `before_gather` of this class: a momentum, signs of a blend, or
            a copy of the gradient. A subclass with a method of its own names its own, or has none.
        sums_norms: whether the engine keeps the Frobenius norm of each matrix's weights in the state `WEIGHT_NORM`, and
            restores the norm after the step.
    """

    Options: type | None = None
    own: Any = None
    whole = False
    momentum = True
    wire_dtype: Literal["float32"] | None = None
    counts_steps = False
    temporary_bytes: int = 0
    sums_norms = False
    gather_kernel: Literal["momentum", "signs", "copy"] | None = None

    def __init__(self, options: MuonOptions) -> None:
        self.options = options
        self.gathering = self.returning = self
        self.parts: Sequence[Algorithm] = (self,)

    @property
    def wire_bytes(self) -> int:
        return 4 if self.wire_dtype == "float32" else self.options.wire_bytes

    def for_parameter(self, number: int) -> Algorithm:
        """The algorithm of a parameter of the plan: this one, unless groups have different ones."""
        return self

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        """The states of a (rows, cols) matrix besides the momentum. `transposed`: whether the outputs are columns."""
        return ()

    def work(self, rows: int, cols: int, work: Work) -> Work:
        """The cost of a whole (rows, cols) matrix for its owner. `work`: of Newton-Schulz."""
        return work

    def kind(self, group: Group) -> Hashable:
        """What `update` reads of the group on the host. A captured step (`cuda_graph`) repeats steps of one kind."""
        return None

    def check_group(self, group: Group) -> None:
        """Raise OptionError for hyperparameters that the algorithm cannot use."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for options or parameters that the algorithm cannot use."""

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        """Update the momentum in place, and write the owner's input to `call.packed`.

        `momentum`: of the parts of the call, or copies. `call.packed` is empty where another rank packs equal shards.
        """
        raise NotImplementedError(f"{type(self).__name__}.before_gather")

    def update(self, batch: Batch, norms: Tensor) -> None:
        """Replace assembled matrices by their updates, and update their states.

        `norms`: (count,) Frobenius norms; NO_UPDATE for a matrix of zeros that is in the place of a missing or
        non-finite gradient, or of a skipped step. Its update is zero, and its states stay.
        """
        self.orthogonalize(batch, self.prepare(batch, norms))
        for part in batch.parts:
            states = part.stacked()
            self.rescale(part.whole, states, part.group, transposed=part.transposed)
            part.store(states)

    def prepare(self, batch: Batch, norms: Tensor) -> Tensor:
        """Change assembled matrices before they are orthogonalized. Returns their Frobenius norms."""
        return norms

    def orthogonalize(self, batch: Batch, norms: Tensor) -> None:
        """Replace U S Vᵀ by approximately U Vᵀ, in place."""
        batch.iterate(batch.whole, norms=norms, out=batch.results)

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        """Turn orthogonalized matrices into updates, in place, and update their states. Only called with states.

        Args:
            whole: (count, rows, cols) matrices of one parameter group.
            states: by name, (count, *shape) float32.
            transposed: whether the outputs are the columns.
        """

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        """Decay weights and add `call.updates`, in place."""
        raise NotImplementedError(f"{type(self).__name__}.after_return")


def only_orthogonalizes(algorithm: Algorithm) -> bool:
    """Whether an algorithm's `update` is Newton-Schulz, perhaps with `rescale` behind it."""
    names = "update", "prepare", "orthogonalize"
    same = (getattr(type(algorithm), name) is getattr(Algorithm, name) for name in names)
    return all(same) and not algorithm.sums_norms


class Decorated(Algorithm):
    """Does as `inner`. A decorator overrides what it changes."""

    def __init__(self, inner: Algorithm) -> None:
        super().__init__(inner.options)
        self.inner = inner

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        self.inner.before_gather(call, momentum, grads)

    def update(self, batch: Batch, norms: Tensor) -> None:
        self.inner.update(batch, norms)

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        self.inner.after_return(call, params)


def work_of(iterations: Sequence[Iteration], dispatch: Methods, algorithm: Algorithm) -> WorkOf:
    """The cost of a matrix by parameter and shape. `iterations`: by parameter."""

    def work(index: int, rows: int, cols: int) -> Work:
        steps, own = iterations[index].steps, algorithm.for_parameter(index)
        method = dispatch.choose(rows, cols, steps)
        states = own.states(rows, cols, transposed=False)
        # Three digits more than bfloat16 in the same bytes. The CPU keeps its bits.
        in_float16 = dispatch.device != "cpu" and (method.dtype, own.wire_bytes) == ("float16", 2)
        float16_results = in_float16 and only_orthogonalizes(own) and not (own.whole or states)
        # So that equal digests imply equal computations.
        of_method = Work(
            method=f"{method}{', results in float16' if float16_results else ''}; {iterations[index]}",
            flops=method.flops(rows, cols, steps),
            reason=method.reason,
            batch=method.batch,
            bytes=method.work_bytes(rows, cols, dispatch.device, own.wire_bytes),
            dtype=method.dtype,
            operators=method.operators(len(steps)),
        )
        cost = replace(
            own.work(rows, cols, of_method),
            wire_bytes=own.wire_bytes,
            state_bytes=sum(spec.bytes for spec in states if spec.saved),
            float16_results=float16_results,
        )
        # A batch has one method, and so one algorithm.
        names = " + ".join(own.options.algorithms)
        return cost if own is algorithm else replace(cost, method=f"{names}: {cost.method}")

    return work
