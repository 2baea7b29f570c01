"""The report of a step's faults and hyperparameters."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.optim import Optimizer

from ..tensors.device import host_zeros, is_host, on_device
from ..tensors.storage import STEP
from .agreement import Agreement
from .equality import difference, group_label
from .faults import Fault
from .replicas import NO_SIZE, differ, hyperparameters, sizes

PARAMETER_FAULTS = frozenset((Fault.HYPERPARAMETERS_DIFFER, Fault.STEPS_DIFFER))
"""Faults of all parameters, see `FaultReport.details`."""


class Reported(Protocol):
    """An optimizer with a place in the report of a Muon."""

    param_groups: list[dict[str, Any]]

    def names(self) -> list[str]:
        """In the order of faults."""

    def on_faults(self, faults: Sequence[Fault]) -> None:
        """Raise ValueError for faults of the last step, equal on all ranks with this report."""


class FaultReport:
    """Shares the faults of a step among all ranks without blocking the host.

    A step adds faults on the device. `send` starts a maximum over the ranks, and the next step reads the result. The
    same maximum compares hyperparameters and the number of steps: each rank sends a hash and its negative.

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
        self._replicas, self._scaled, self.steps = tuple(replicas), False, 0
        groups = sum(len(optimizer.param_groups) for optimizer in self._optimizers.values())
        # One int32 for each of, in this order:
        #   each name: the code of its fault;
        #   each replica: its gradient's size, then the negatives of these;
        #   each group, and the number of steps: a hash, then the negatives of these;
        #   two flags: this rank skipped the step, this rank took it.
        size, hashes = len(self.names) + 2 * len(self._replicas), 2 * (groups + 1)
        self._codes = torch.zeros(size + hashes + 2, dtype=torch.int32, device=device)
        self._sizes = self._codes[len(self.names) : size].view(2, -1)
        self._sizes.fill_(NO_SIZE)
        self._late = torch.zeros(len(self.names), dtype=torch.int32, device=device)
        self._shared = torch.zeros_like(self._codes)
        self._told_steps = 0
        self._sent_values: list[dict[str, Hashable]] = []
        self._agreement, self.device = agreement, device
        self._work: Work | None = None
        self._on_device = not is_host(device)
        shared = self._shared
        self._on_host = host_zeros(shared) if self._on_device else shared
        self._hashes = torch.zeros(hashes, dtype=torch.int32, device="cpu", pin_memory=self._on_device)
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

    def add_where(self, parameters: Tensor, faulty: Tensor, fault: Fault) -> None:
        """Add a fault of `parameters` (count,) int64 where `faulty` (count,) bool, on the device."""
        self._codes.scatter_reduce_(0, parameters, faulty.to(torch.int32) * fault, "amax")

    def add_too_large(self, parameters: Tensor, broken: Tensor, *, late: bool) -> None:
        """Add impossible updates. `late` updates run on another stream after `send`."""
        codes = self._late if late else self._codes
        codes.scatter_reduce_(0, parameters, broken.to(torch.int32) * Fault.UPDATE_TOO_LARGE, "amax")

    def add_late(self) -> None:
        """Add faults of late updates. The current stream has waited for these updates."""
        torch.maximum(self._codes[: len(self.names)], self._late, out=self._codes[: len(self.names)])
        self._late.zero_()

    def add(self, faults: Sequence[Fault], start: int = 0) -> None:
        if any(faults):
            new = on_device(torch.tensor(faults, dtype=torch.int32, device="cpu"), self._codes.device)
            codes = self._codes[start : start + len(faults)]
            torch.maximum(codes, new, out=codes)

    def add_skipped(self, skipped: Tensor) -> None:
        """Add () bool: whether this rank skips the step. Either all ranks call this or none."""
        self._codes[-2:] = torch.stack((skipped, skipped.logical_not()))
        self._scaled = True

    def _add_sizes(self, stored: Sequence[Tensor | None]) -> None:
        grads = {place: grad for place, p in enumerate(self._replicas) if (grad := stored[p]) is not None}
        if not grads:
            return
        new = sizes(list(grads.values()))
        if len(grads) == len(self._replicas):
            self._sizes.copy_(new)
        else:
            # Indexing by a list would block the host.
            for place, size in zip(grads, new.unbind(1), strict=True):
                self._sizes[:, place].copy_(size)

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Begin a step with these gradients, by parameter."""
        self.steps += 1
        if self._replicas:
            self._add_sizes(grads)
        if self._agreement.peers is None:
            return
        # A scheduler changes the groups after the step.
        self._sent_values = [hyperparameters(group) for o in self._optimizers.values() for group in o.param_groups]
        hashes = [zlib.crc32(repr(values).encode()) & 0x7FFFFFFF for values in self._sent_values]
        hashes.append((self.steps - self._told_steps) & 0x7FFFFFFF)
        self._hashes.copy_(torch.tensor([*hashes, *(-h for h in hashes)], dtype=torch.int32, device="cpu"))

    def send(self) -> None:
        """Start to share the faults of a step."""
        self._shared.copy_(self._codes)
        first = len(self.names) + 2 * len(self._replicas)
        self._shared[first:-2].copy_(self._hashes, non_blocking=True)
        self._codes.zero_()
        self._sizes.fill_(NO_SIZE)
        shared = self._shared[: self._shared.numel() - (0 if self._scaled else 2)]
        self._scaled = False
        peers = self._agreement.peers
        self._work = None if peers is None else dist.all_reduce(shared, dist.ReduceOp.MAX, group=peers, async_op=True)
        if self._on_device:
            self._send_to_host()

    def _send_to_host(self) -> None:
        # The computing stream must not wait for late ranks.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            if self._work is not None:
                self._work.wait()
            self._on_host.copy_(self._shared, non_blocking=True)
            self._sent.record()

    def quiet(self) -> bool:
        """Whether no rank reports a fault, a difference or a skip for the last step. The host waits for the report."""
        if self._replicas:
            return False
        if self._on_device:
            self._sent.synchronize()
        elif self._work is not None:
            self._work.wait()
        self._work = None
        *codes, skipped, _ = self._on_host.tolist()
        count, half = len(self.names), (len(codes) - len(self.names)) // 2
        differing = [-number for number in codes[count + half :]] != codes[count : count + half]
        return not (any(codes[:count]) or differing or skipped)

    def send_late(self) -> None:
        """Share the faults since the last `send`. Collective over the peers."""
        self.add_late()
        self.send()

    def late(self) -> list[Fault]:
        """This rank's faults since the last `send`, by parameter, also for the next report."""
        self.add_late()
        return [Fault(code) for code in self._codes[: len(self.names)].tolist()]

    def uncount_skipped(self) -> None:
        """Take the last step back from the counts of Muon's groups, once, if all ranks skipped it. The host waits."""
        self._wait()
        skipped, stepped = self._on_host[-2:].tolist()
        if skipped and not stepped:
            self._on_host[-2] = 0
            for group in self._optimizers["muon"].param_groups:
                if STEP in group:
                    group[STEP] -= 1

    def _wait(self) -> None:
        if self._on_device:
            self._sent.synchronize()
        elif self._work is not None:
            self._work.wait()
        self._work = None

    def read(self) -> list[Fault]:
        """By parameter, the maximum fault over all ranks in the last step."""
        self._wait()
        *codes, skipped, stepped = self._on_host.tolist()
        count, replicas = len(self.names), len(self._replicas)
        if skipped and stepped:
            return [Fault.SKIPPED] * count
        hashes = codes[count + 2 * replicas :]
        differing = [a != -b for a, b in zip(hashes[: len(hashes) // 2], hashes[len(hashes) // 2 :], strict=True)]
        # Members of an enum take time, and most steps have no fault.
        faults = [Fault(code) for code in codes[:count]] if any(codes[:count]) else [Fault.NONE] * count
        if any(differing):
            fault = Fault.STEPS_DIFFER if differing[-1] else Fault.HYPERPARAMETERS_DIFFER
            faults = [fault if code is Fault.NONE else code for code in faults]
        both = codes[count : count + 2 * replicas]
        for parameter, largest, negative_smallest in zip(self._replicas, both[:replicas], both[replicas:], strict=True):
            if differ(largest, negative_smallest):
                faults[parameter] = Fault.REPLICAS_DIFFER
        return faults

    def details(self, faults: Sequence[Fault]) -> str:
        """The differing hyperparameters or numbers of steps, if any. Collective over the peers."""
        if PARAMETER_FAULTS.isdisjoint(faults):
            return ""
        values: dict[str, Hashable] = {"number of steps": self.steps}
        if Fault.HYPERPARAMETERS_DIFFER in faults:
            labels = [group_label(n, group) for n, o in self._optimizers.items() for group in o.param_groups]
            values = {
                f"{key} of {label}": value
                for label, group in zip(labels, self._sent_values, strict=True)
                for key, value in group.items()
            }
        # Once: later steps are compared from here on.
        self._told_steps = self.steps
        return difference(self._agreement.gathered_from_peers(values))

    def clear(self) -> None:
        self._on_host.zero_()
