"""Counts every collective of this process by the dispatcher's c10d operators.

Eager `torch.distributed` calls, functional collectives and DTensor's collectives all become these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


@dataclass(frozen=True)
class Call:
    """A collective of this rank among global `ranks`, named like the operator without underscores.

    `payload`: bytes of the input tensors. `sent`: bytes that must leave the rank with any backend: the other ranks'
    data, once per rank; a ring's share for an all-reduce. `operations`: number of NCCL operations.
    """

    name: str
    ranks: tuple[int, ...]
    payload: int
    sent: int
    operations: int = 1

    @property
    def group_size(self) -> int:
        """Number of participating ranks."""
        return len(self.ranks)


class CollectiveCounter(TorchDispatchMode):
    """While active, appends a Call to `calls` for each collective."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @property
    def sent(self) -> int:
        """Bytes sent to other ranks by all calls."""
        return sum(call.sent for call in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor then breaks its operation into collectives and local operations.
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        # Higher-order operators, for example FlexAttention's, have no schema.
        name = func._schema.name.split("::")[1] if isinstance(func, torch._ops.OpOverload) else ""
        if name not in ("", *NO_COLLECTIVES) and func.namespace in NAMESPACES:
            self.calls.append(_call(name, func, args, kwargs or {}))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operator."""
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Operator:
    """A collective to count: arguments by name, and this rank's index in the group."""

    arguments: Mapping[str, Any]
    size: int
    rank: int

    @property
    def input(self) -> Any:
        """Input tensor or tensors of this rank."""
        names = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")
        return next(self.arguments[name] for name in names if name in self.arguments)

    @property
    def is_root(self) -> bool:
        """Whether the collective starts or ends at this rank; roots are ranks of the group."""
        root = self.arguments["root_rank"] if "root_rank" in self.arguments else self.arguments["src"]
        return bool(root == self.rank)


def _call(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    plain = name.strip("_").removesuffix("_out")
    if plain not in SENT:
        raise NotImplementedError(f"{name}: say in SENT what this collective sends")
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group(arguments)
    operator = Operator(arguments, dist.get_world_size(group), dist.get_rank(group))
    ranks = tuple(dist.get_process_group_ranks(group))
    return Call(plain, ranks, _bytes(operator.input), SENT[plain](operator), _operations(plain, operator))


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _operations(name: str, operator: Operator) -> int:
    """1, except for lists of unequal parts: NCCL runs a broadcast or a reduction for each part."""
    parts = {"allgather": "output_tensors", "reduce_scatter": "input_tensors"}.get(name)
    if parts is None:
        return 1
    (tensors,) = operator.arguments[parts]
    return len(tensors) if len({part.numel() for part in tensors}) > 1 else 1


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


def _nothing(operator: Operator) -> int:
    return 0


def _all_of_it(operator: Operator) -> int:
    return _bytes(operator.input)


def _to_all_others(operator: Operator) -> int:
    return _bytes(operator.input) * (operator.size - 1)


def _but_one_part(operator: Operator) -> int:
    return _bytes(operator.input) * (operator.size - 1) // operator.size


def _but_own_part(operator: Operator) -> int:
    """Bytes of a list with a part for each rank, perhaps nested, without this rank's own; some ranks have no list."""
    parts = operator.input
    while parts and not isinstance(parts[0], Tensor):
        parts = parts[0]
    return _bytes(parts) - _bytes(parts[operator.rank]) if parts else 0


def _but_own_split(operator: Operator) -> int:
    splits = operator.arguments["input_split_sizes"]
    if not splits:
        return _but_one_part(operator)
    rows = max(1, sum(splits))
    return _bytes(operator.input) * (rows - splits[operator.rank]) // rows


def _from_root(operator: Operator) -> int:
    return _to_all_others(operator) if operator.is_root else 0


def _to_root(operator: Operator) -> int:
    return 0 if operator.is_root else _bytes(operator.input)


def _sends_of_batch(operator: Operator) -> int:
    kinds, tensors = operator.arguments["op_list"], operator.arguments["tensors"]
    return sum(_bytes(tensor) for kind, tensor in zip(kinds, tensors, strict=True) if kind == "isend")


SENT: Mapping[str, Callable[[Operator], int]] = {
    **dict.fromkeys(("allgather", "allgather_base", "allgather_coalesced"), _to_all_others),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_into_tensor"), _to_all_others),
    "all_gather_into_tensor_coalesced": _to_all_others,
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), lambda o: 2 * _but_one_part(o)),
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), lambda o: 2 * _but_one_part(o)),
    **dict.fromkeys(("reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor"), _but_one_part),
    **dict.fromkeys(("reduce_scatter", "alltoall", "scatter"), _but_own_part),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _but_own_split),
    "broadcast": _from_root,
    **dict.fromkeys(("reduce", "gather"), _to_root),
    **dict.fromkeys(("send", "isend"), _all_of_it),
    **dict.fromkeys(("recv", "recv_any_source", "irecv", "barrier", "monitored_barrier"), _nothing),
    "batch_p2p_ops": _sends_of_batch,
}
"""Bytes that must leave this rank, for each operator."""
