"""The report of a step's faults and hyperparameters."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.optim import Optimizer

from ..exchange.agreement import Agreement
from ..tensors.dtensor import host_zeros, is_host, on_device
from ..tensors.names import names_in
from ..tensors.storage import STEP
from .faults import Fault, norm_dtype

NO_SIZE = -(2**30)
"""Size of a missing gradient."""
UNIT = 2**16
"""Sizes are base-2 logarithms, times this factor."""
NOT_FINITE_SIZE = 1000
"""Logarithm of a non-finite norm."""
TOLERANCE = 2**6
"""Largest size difference from rounding: 0.07 %. Different data gives several per cent."""


class Reported(Protocol):
    """An optimizer with a place in the report of a Muon."""

    param_groups: list[dict[str, Any]]

    def names(self) -> list[str]:
        """In the order of faults."""

    def on_faults(self, faults: Sequence[Fault]) -> None:
        """Raise ValueError for faults of the last step, equal on all ranks with this report."""


@dataclass(frozen=True)
class Flags:
    """Matrices that a step finds to be not finite, in one tensor for all buckets, so that a report takes two launches.

    `found`: (count,) bool, which the step writes. `parameters`: (count,) int64. Both are on the device.
    """

    found: Tensor
    parameters: Tensor


class FaultReport:
    """Shares the faults of a step among all ranks without blocking the host.

    A step adds faults on the device. `send` starts a maximum over the ranks, and the next step reads the result. The
    same maximum compares values that must be equal: each rank sends a value and its negative, whose maxima add up to
    the spread.

    `optimizer`, `others`: by name. `replicas`: parameters with a result from one rank's gradient for all replicas.
    """

    def __init__(
        self,
        names: Sequence[str],
        optimizer: Mapping[str, Optimizer],
        others: Mapping[str, Reported],
        device: torch.device,
        agreement: Agreement,
        replicas: Sequence[int] = (),
    ) -> None:
        self._others = tuple(others.values())
        # Weak, because hooks of the model keep the report for a late update.
        self._optimizers = weakref.WeakValueDictionary[str, Any]({**optimizer, **others})
        self.names = (*names, *(name for other in self._others for name in other.names()))
        self._first = list(accumulate((len(other.names()) for other in self._others), initial=len(names)))
        self._replicas, self.steps, self._told_steps = tuple(replicas), 0, 0
        # One int32 for each of, in this order:
        #   each name: the code of its fault;
        #   each replica: its gradient's size; all hyperparameters: a hash; the number of steps;
        #   the negatives of these;
        #   two flags: the step was skipped, this rank took it or would have.
        self._parts = [len(self.names), 2 * (len(self._replicas) + 2), 2]
        self._codes = torch.zeros(sum(self._parts), dtype=torch.int32, device=device)
        self._faults, compared, self._flags = self._codes.split(self._parts)
        self._sizes = compared.view(2, -1)[:, : len(self._replicas)].fill_(NO_SIZE)
        self._found = Flags(*(torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.bool, torch.int64)))
        self._shared = torch.zeros_like(self._codes)
        self._shared_hashes = self._shared.split(self._parts)[1].view(2, -1)[:, len(self._replicas) :]
        self._sent_values: list[dict[str, str]] = []
        self._agreement, self.device = agreement, device
        self._work: Work | None = None
        self._on_device = not is_host(device)
        self._on_host = host_zeros(self._shared) if self._on_device else self._shared
        self._hashes = torch.zeros(2, 2, dtype=torch.int32, device="cpu", pin_memory=self._on_device)
        self._module: Any = torch.get_device_module(device)
        self._stream, self._sent = self._module.Stream(), self._module.Event()

    @property
    def is_shared(self) -> bool:
        return self._agreement.peers is not None

    def start_of(self, other: Reported) -> int:
        return self._first[self._others.index(other)]

    def tell_others(self, faults: Sequence[Fault]) -> None:
        for other, (start, stop) in zip(self._others, pairwise(self._first), strict=True):
            other.on_faults(faults[start:stop])

    def watch(self, flags: Flags) -> None:
        """The flags of a step from now on."""
        self._found = flags

    def add_where(self, parameters: Tensor, faulty: Tensor, fault: Fault) -> None:
        """Add a fault of `parameters` (count,) int64 where `faulty` (count,) bool, on the device."""
        self._faults.scatter_reduce_(0, parameters, faulty.to(torch.int32) * fault, "amax")

    def _add_found(self) -> None:
        """Add the flags of the step to the faults by parameter, and clear them."""
        flags = self._found
        # NOT_FINITE is 1.
        self._faults.scatter_reduce_(0, flags.parameters, flags.found.to(torch.int32), "amax")
        flags.found.zero_()

    def add(self, faults: Sequence[Fault], start: int = 0) -> None:
        if any(faults):
            new = on_device(torch.tensor(faults, dtype=torch.int32, device="cpu"), self._faults.device)
            of_these = self._faults[start : start + len(faults)]
            torch.maximum(of_these, new, out=of_these)

    def add_skipped(self, skipped: Tensor, differs: Tensor | None = None) -> None:
        """Add () bool: whether the step is skipped. Either all ranks call this or none.

        `differs`: whether this rank would have taken the step, because its GradScaler found nothing.
        """
        self._flags[0].copy_(skipped)
        torch.logical_not(skipped, out=self._flags[1])
        if differs is not None:
            self._flags[1].logical_or_(differs)

    def _add_sizes(self, grads: Sequence[Tensor | None]) -> None:
        present = [place for place, parameter in enumerate(self._replicas) if grads[parameter] is not None]
        if not present:
            return
        held = [grad for parameter in self._replicas if (grad := grads[parameter]) is not None]
        norms = torch.stack(torch._foreach_norm(held, 2, dtype=norm_dtype(held)))
        sizes = norms.log2().nan_to_num(NOT_FINITE_SIZE, NOT_FINITE_SIZE, -NOT_FINITE_SIZE).mul(UNIT).round().int()
        pairs = torch.stack((sizes, -sizes))
        if len(present) == len(self._replicas):
            self._sizes.copy_(pairs)
        else:
            self._sizes.index_copy_(1, on_device(torch.tensor(present, device="cpu"), self.device), pairs)

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Begin a step with these gradients, by parameter."""
        self.steps += 1
        self._add_sizes(grads)
        if self._agreement.peers is None:
            return
        # A scheduler changes the groups after the step.
        self._sent_values = [hyperparameters(group) for o in self._optimizers.values() for group in o.param_groups]
        hashes = zlib.crc32(repr(self._sent_values).encode()) & 0x7FFFFFFF, self.steps - self._told_steps
        self._hashes.copy_(torch.tensor([hashes, [-h for h in hashes]], dtype=torch.int32, device="cpu"))

    def send(self) -> None:
        """Start to share the faults of a step."""
        self._add_found()
        self._shared.copy_(self._codes)
        self._shared_hashes.copy_(self._hashes, non_blocking=True)
        self._codes.zero_()
        self._sizes.fill_(NO_SIZE)
        peers = self._agreement.peers
        if peers is not None:
            self._work = dist.all_reduce(self._shared, dist.ReduceOp.MAX, group=peers, async_op=True)
        if self._on_device:
            # The computing stream must not wait for late ranks.
            self._stream.wait_stream(self._module.current_stream())
            with self._module.stream(self._stream):
                if self._work is not None:
                    self._work.wait()
                self._on_host.copy_(self._shared, non_blocking=True)
                self._sent.record()

    def _read(self) -> tuple[list[int], list[int], int, int, list[int]]:
        """Codes of faults, spreads of sizes, of hyperparameters and of steps, and the flags. The host waits."""
        if self._on_device:
            self._sent.synchronize()
        elif self._work is not None:
            self._work.wait()
        self._work = None
        codes, compared, flags = self._on_host.split(self._parts)
        *sizes, values, steps = compared.view(2, -1).sum(0).tolist()
        return codes.tolist(), sizes, values, steps, flags.tolist()

    def is_clean(self) -> bool:
        """Whether no rank reports a fault, a difference or a skip for the last step. The host waits for the report."""
        codes, sizes, values, steps, (skipped, _) = self._read()
        return not (any(codes) or values or steps or skipped or max(sizes, default=0) > TOLERANCE)

    def unsent(self) -> list[Fault]:
        """This rank's faults since the last `send`, by parameter, also for the next report."""
        self._add_found()
        return [Fault(code) for code in self._faults.tolist()]

    def uncount_skipped(self) -> None:
        """Take the last step back from the counts of Muon's groups, once, if all ranks skipped it. The host waits."""
        *_, (skipped, stepped) = self._read()
        if skipped and not stepped:
            self._on_host[-2] = 0
            for group in self._optimizers["muon"].param_groups:
                if STEP in group:
                    group[STEP] -= 1

    def read(self) -> list[Fault]:
        """By parameter, the maximum fault over all ranks in the last step."""
        codes, sizes, values, steps, (skipped, stepped) = self._read()
        if skipped and stepped:
            return [Fault.SKIPPED] * len(codes)
        # Members of an enum take time, and most steps have no fault.
        faults = [Fault(code) for code in codes] if any(codes) else [Fault.NONE] * len(codes)
        if steps or values:
            fault = Fault.STEPS_DIFFER if steps else Fault.HYPERPARAMETERS_DIFFER
            faults = [fault if code is Fault.NONE else code for code in faults]
        for parameter, spread in zip(self._replicas, sizes, strict=True):
            if spread > TOLERANCE:
                faults[parameter] = Fault.REPLICAS_DIFFER
        return faults

    def details(self, faults: Sequence[Fault]) -> str:
        """The differing hyperparameters or numbers of steps, if any. Collective over the peers."""
        if Fault.HYPERPARAMETERS_DIFFER in faults:
            labels = [group_label(n, group) for n, o in self._optimizers.items() for group in o.param_groups]
            pairs = zip(labels, self._sent_values, strict=True)
            values = {f"{key} of {label}": LocalValue(text) for label, sent in pairs for key, text in sent.items()}
        elif Fault.STEPS_DIFFER in faults:
            values = {"number of steps": LocalValue(str(self.steps))}
        else:
            return ""
        # Once: later steps are compared from here on.
        self._told_steps = self.steps
        return differences(self._agreement.gathered_from_peers(values))

    def clear(self) -> None:
        self._on_host.zero_()


def hyperparameters(group: Mapping[str, Any]) -> dict[str, str]:
    """Hyperparameters as text, without values on a device, because reading would wait."""
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    on_host = {key: v.item() if isinstance(v, Tensor) and is_host(v.device) else v for key, v in values.items()}
    texts = {key: repr(value) for key, value in on_host.items() if not isinstance(value, Tensor)}
    # The address of a framework's object in a group differs between ranks.
    return {key: text for key, text in texts.items() if " at 0x" not in text}


def group_label(name: str, group: Mapping[str, Any]) -> str:
    """Text for errors."""
    return f"{name}'s group of {names_in(group)[0]}" if group["params"] else f"{name}'s empty group"


LISTED = 5
"""Differences in an error text."""


class LocalValue(NamedTuple):
    """A value on this rank: text, or the bit sum of a tensor. `shard`: coordinates; only equal shards are compared."""

    value: Hashable
    shard: tuple[int, ...] = ()


def differences(everywhere: Mapping[int, Mapping[str, LocalValue]]) -> str:
    """The values by rank and label that differ between ranks, as text; empty without a difference."""
    labels = dict.fromkeys(label for held in everywhere.values() for label in held)
    texts = [text for label in labels if (text := _difference(label, everywhere))]
    more = f"; and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return "; ".join(texts[:LISTED]) + more


def _difference(label: str, everywhere: Mapping[int, Mapping[str, LocalValue]]) -> str:
    by_shard: dict[tuple[int, ...], dict[Hashable, list[int]]] = {}
    for rank, held in everywhere.items():
        if label in held:
            by_shard.setdefault(held[label].shard, {}).setdefault(held[label].value, []).append(rank)
    texts = []
    for ranks in by_shard.values():
        if isinstance(next(iter(ranks)), str) and len(ranks) > 1:
            return f"{label} is " + " and ".join(f"{value} on ranks {where}" for value, where in ranks.items())
        # The majority is right most likely.
        first, *others = sorted(ranks.values(), key=lambda where: (-len(where), where))
        if others:
            texts.append(f"ranks {sorted(chain(*others))} differ from ranks {first}")
    return f"{label}: {', '.join(texts)}" if texts else ""
