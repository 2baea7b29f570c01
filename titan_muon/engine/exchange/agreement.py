"""Agreement of all ranks on a plan before the first step, and the process groups of a step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...options import HYPERPARAMETERS, SHARED, MuonOptions
from ..layout.intervals import Geometries, Ranks, components
from ..layout.types import Plan
from ..program.program import collective_ranks
from ..tensors.dtensor import mesh_axes
from ..tensors.process_groups import (
    backends,
    default_store,
    fast_options,
    group_count,
    ranks_of,
    timeout_of,
)
from ..tensors.storage import TrainedParam

PATIENCE = 2.0
"""Seconds to wait for other ranks' places after a failed collective."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlanReport:
    """Summary of a rank's plan, equal for equal plans.

    Attributes:
        ranks: holders of the plan's parameters.
        buckets: ranks of each collective of a bucket.
        groups: sets of ranks that need a new process group.
        sharing: disjoint sets of ranks that must take the same steps.
        parts: digests of the plan and of its causes by name, so that an error names the difference.
        optional: whether Muon may train nothing on any rank, because rules give all parameters to other optimizers.
    """

    ranks: Ranks = ()
    buckets: tuple[Ranks, ...] = ()
    groups: tuple[Ranks, ...] = ()
    sharing: tuple[Ranks, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    optional: bool = False


LOCAL_OPTIONS = (
    *("orthogonalize", "ns_dtype", "ns_kernel", "release_grads", "keep_buffers"),
    *("split", "buffer_gib", "machine", "offload"),
)
"""Options that may differ between ranks, for example `machine.file` between nodes."""


def report_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    groups: Sequence[Mapping[str, Any]],
    others: Mapping[str, Any],
    all_ranks: tuple[int, ...],
    *,
    optional: bool = False,
) -> PlanReport:
    """The part of a plan to agree on before the first step. `all_ranks`: of the process group."""
    parts = {
        "parameters": [(p.fqn, p.layout.shape, p.layout.placements, p.layout.mesh.ranks) for p in plan.parameters],
        # A learning rate in a tensor prints its device, which differs between ranks.
        "hyperparameters": [
            {key: v.item() if isinstance(v := group.get(key), Tensor) else v for key in (*HYPERPARAMETERS, "algorithm")}
            for group in groups
        ],
        "options": {name: getattr(options, name) for name in SHARED if name not in LOCAL_OPTIONS},
        "others": [(name, other.names(), len(other.param_groups)) for name, other in others.items()],
        "plan": plan.digest(),
    }
    travelling, replica_groups = collective_ranks(plan, geometries)
    buckets = tuple(sorted({*travelling, *replica_groups}))
    sharing = tuple(sorted(set(components(_sharing(plan, every=options.skips_missing)).values())))
    # From layouts, because all ranks, also outside a mesh, must create equal groups.
    existing = {all_ranks}
    for trained, parameter in zip(params, plan.parameters, strict=True):
        existing.update(mesh_axes(trained.param, parameter.layout))
    return PlanReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        buckets=buckets,
        groups=tuple(sorted({*buckets, *sharing} - existing)),
        sharing=sharing,
        parts=tuple((name, digest_of(part).hex()[:16]) for name, part in parts.items()),
        optional=optional,
    )


def _sharing(plan: Plan, *, every: bool) -> Iterator[tuple[int, ...]]:
    """Sets of ranks that decide together about missing gradients."""
    yield from (bucket.group for bucket in plan.buckets)
    # Replicas of a plain tensor may get a gradient only on some ranks. Replicas of a DTensor get all or none.
    for index, ranks in enumerate(plan.local):
        if len(ranks) > 1 and (every or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks


class Agreement:
    """Collective checks and process groups over the ranks of `process_group`, with or without matrices.

    `ranks`: global ranks of `process_group`, by default all. `peers`: process group of the ranks with the same steps as
    this rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = ranks_of(process_group)
        self._size, self._all = len(self.ranks), process_group
        self._known: dict[Ranks, dist.ProcessGroup] = {}
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        self._new_groups: list[dist.ProcessGroup] = []
        self.peers: dist.ProcessGroup | None = None
        self._build = 0

    def open(self, report: PlanReport, known: Mapping[Ranks, dist.ProcessGroup], device: torch.device) -> None:
        """Compare reports, then make all process groups except `known`, and use each once.

        Raises ValueError on every rank if plans differ.
        """
        reports = self.gathered(report)
        check_reports(reports)
        if self._size == 1:
            return
        self._build = self._reduced(time.time_ns(), dist.ReduceOp.MAX)
        # A mesh's group never replaces a group that all ranks make, because meshes differ.
        self._known = dict(known)
        anywhere = {ranks for peer in set(reports.values()) for ranks in peer.groups}
        for ranks in sorted(anywhere - self._groups.keys()):
            self._align_names(device)
            self._groups[ranks] = self._new_group(ranks, device)
        mine = next((ranks for ranks in report.sharing if self.rank in ranks), None)
        self.peers = None if mine is None else self.group(mine)
        self._warm_up([self.group(ranks) for ranks in report.buckets if self.rank in ranks], device)
        if self.peers is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=self.peers)

    @contextmanager
    def unchanged_after_errors(self) -> Iterator[None]:
        """Give `group` and `peers` back the present process groups after an error."""
        known, peers = self._known, self.peers
        try:
            yield
        except BaseException:
            self._known, self.peers = known, peers
            raise

    def differing(self, values: Mapping[str, Hashable]) -> frozenset[str]:
        """The keys with another value on some rank with the key. Collective."""
        others = self.distinct(dict(sorted(values.items())))
        return frozenset(
            key for key, value in values.items() if any(other.get(key, value) != value for other in others)
        )

    def gathered_from_peers(self, value: T) -> dict[int, T]:
        """The values of all peers, by rank. Collective over the peers."""
        if self.peers is None:
            return {self.rank: value}
        values: list[Any] = [None] * dist.get_world_size(self.peers)
        dist.all_gather_object(values, value, group=self.peers)
        return dict(zip(dist.get_process_group_ranks(self.peers), values, strict=True))

    def locate(self, error: RuntimeError, steps: int) -> None:
        """Add each answering rank's step to a collective's error. `steps`: number of this step."""
        if self.peers is None or not dist.is_initialized():
            return
        # Through the store, because collectives have failed.
        # By the time of this build, because an earlier Muon's error has left its steps there.
        store, prefix = default_store(), f"titan_muon/step_of_rank/{self._build}"
        ranks, known = dist.get_process_group_ranks(self.peers), {self.rank: steps}
        try:
            store.set(f"{prefix}/{self.rank}", str(steps))
            deadline = time.monotonic() + PATIENCE
            while len(known) < len(ranks) and time.monotonic() < deadline:
                known |= {r: int(store.get(key)) for r in ranks if store.check([key := f"{prefix}/{r}"])}
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            # The store may be gone too.
            pass
        silent = [rank for rank in ranks if rank not in known]
        places = ", ".join(f"rank {rank} in step {known[rank]}" for rank in sorted(known))
        note = f"Muon's step {steps} on rank {self.rank} did not end. Since Muon was built: {places}"
        if silent:
            note += f"; ranks {silent} do not answer, because they ended, or wait outside of step()"
        error.add_note(note)

    def gathered(self, value: T) -> dict[int, T]:
        """The values of all ranks, by rank. Collective."""
        digests, values = self._exchange(value)
        return {rank: values[digest] for rank, digest in digests.items()}

    def distinct(self, value: T) -> list[T]:
        """The different values of all ranks, in the order of ranks. Collective."""
        digests, values = self._exchange(value)
        return [values[digest] for digest in dict.fromkeys(digests.values())]

    def _exchange(self, value: T) -> tuple[dict[int, bytes], dict[bytes, T]]:
        """The digests of all ranks' values, and the values by digest."""
        mine = digest_of(value)
        if self._size == 1:
            return {self.rank: mine}, {mine: value}
        # 1,024 reports would take megabytes, so only the lowest rank with each digest broadcasts its value.
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        # The fake process group of dry runs leaves outputs unchanged.
        received = [sent.clone() for _ in self.ranks]
        dist.all_gather(received, sent, group=self._all)
        digests = {rank: bytes(digest.tolist()) for rank, digest in zip(self.ranks, received, strict=True)}
        values = {mine: value}
        first = {digest: rank for rank, digest in reversed(digests.items())}
        for digest, rank in sorted(first.items(), key=lambda item: item[1]) if len(first) > 1 else ():
            message = [value if rank == self.rank else None]
            dist.broadcast_object_list(message, src=rank, group=self._all)
            assert message[0] is not None, f"rank {rank} reported nothing"
            values[digest] = message[0]
        return digests, values

    def raise_on_all_ranks(self, build: Callable[[], T]) -> T:
        """The result of `build` on this rank.

        Raises ValueError on every rank if `build` raises a ValueError on any rank. After another error, such as an
        OutOfMemoryError, the failed rank raises the error itself, and all other ranks RuntimeError.
        """
        results: list[T] = []
        fault: Exception | None = None
        try:
            results.append(build())
        except Exception as error:
            fault = error
        nobody = self.ranks[-1] + 1
        rank = self._reduced(nobody if fault is None else self.rank, dist.ReduceOp.MIN)
        if rank == nobody:
            return results[0]
        refused = isinstance(fault, ValueError)
        if fault is not None and self._size == 1:
            raise fault
        message = [None if fault is None else (refused, str(fault) if refused else f"{type(fault).__name__}: {fault}")]
        dist.broadcast_object_list(message, src=rank, group=self._all)
        if fault is not None and not refused:
            raise fault
        assert message[0] is not None, f"rank {rank} has a fault, and sent no message"
        is_refusal, text = message[0]
        raise (ValueError if is_refusal else RuntimeError)(f"{text} (on rank {rank})") from fault

    def any_rank(self, value: bool) -> bool:
        return bool(self._reduced(int(value), dist.ReduceOp.MAX))

    def _reduced(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        """The minimum or maximum over all ranks."""
        if self._size == 1:
            return number
        tensor = torch.tensor([number], device=self._device)
        dist.all_reduce(tensor, operation, group=self._all)
        return int(tensor.item())

    def group(self, ranks: Ranks) -> dist.ProcessGroup:
        if len(ranks) == self._size:
            return self._whole
        return self._known[ranks] if ranks in self._known else self._groups[ranks]

    def start_max_over_peers(self, tensor: Tensor) -> dist.Work | None:
        return None if self.peers is None else start_max(tensor, self.peers)

    def close(self) -> None:
        """Destroy the process groups. Collective."""
        for group in self._new_groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        self._new_groups.clear()

    def _new_group(self, ranks: Ranks, device: torch.device) -> dist.ProcessGroup:
        timeouts = (timeout_of(self._whole, kind) for kind in dict.fromkeys((device.type, "cpu", self._device.type)))
        timeout = next((timeout for timeout in timeouts if timeout is not None), None)
        options: dict[str, Any] = {"timeout": timeout, "pg_options": fast_options(device.type, timeout, self._all)}
        # Without `process_group` on every rank, because PyTorch names such groups by a counter.
        if self._all is not None:
            options |= {"backend": dist.get_backend_config(self._all), "use_local_synchronization": True}
        group = dist.new_group(list(ranks), **options)
        if self.rank in ranks:
            self._new_groups.append(group)
        return group

    def _align_names(self, device: torch.device) -> None:
        """Give all ranks of a `process_group` the same number of groups, which is a part of a new group's name."""
        if self._all is not None:
            counts = self.gathered(group_count())
            for _ in range(max(counts.values()) - counts[self.rank]):
                self._new_group((self.rank,), device)

    @property
    def _whole(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self._all is None else self._all
        assert group is not None, "the default process group exists while ranks meet"
        return group

    @property
    def _device(self) -> torch.device:
        """Device for collectives of all ranks."""
        kinds = backends(self._all)
        return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))

    def _warm_up(self, used: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        # NCCL opens connections in the first collective. A broken network should fail before the first step.
        for group in used:
            sent = torch.zeros(dist.get_world_size(group), device=device)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def digest_of(value: object) -> bytes:
    """SHA-256 of the text."""
    return hashlib.sha256(repr(value).encode()).digest()


CAUSES: Mapping[str, str] = {
    "parameters": "their parameters differ, in names, order, shapes or layouts; build the optimizer on every rank from "
    "the same parameters, in the same order; a parameter that only some ranks have must be a DTensor on their mesh",
    "hyperparameters": "their parameter groups have different hyperparameters; set the same values on every rank",
    "options": "their options differ; give every rank the same options",
    "others": "the optimizers beside Muon have different parameters or groups; give AdamW the same parameters on every "
    "rank",
    "plan": "parameters, hyperparameters and options are equal, and the planned costs differ; give every rank the same "
    "machine.file, the same kernels (ns_kernel) and the same versions of titan_muon and PyTorch",
}
"""Error text by the first differing part of two reports."""


def check_reports(reports: Mapping[int, PlanReport]) -> None:
    """Raise ValueError for different plans of the same parameters, and without any parameter. `reports`: by rank."""
    # Pipeline stages and towers may have different plans.
    first: dict[PlanReport, int] = {}
    for rank, report in reports.items():
        first.setdefault(report, rank)
    for report, rank in first.items():
        differing = [peer for peer in report.ranks if reports.get(peer, report) != report]
        empty = [peer for peer in differing if not reports[peer].ranks]
        if empty:
            raise ValueError(
                f"Muon has no parameter to train on ranks {empty}, which hold parameters that rank "
                f"{rank} trains: pass the parameters to Muon there, and do not freeze them"
            )
        if differing:
            parts = dict(reports[differing[0]].parts)
            cause = next((name for name, digest in report.parts if parts.get(name) != digest), "plan")
            raise ValueError(f"ranks {differing} planned another Muon step than rank {rank}: {CAUSES[cause]}")
    if not any(report.ranks or report.optional for report in first):
        raise ValueError(
            "Muon has no parameter to train: pass parameters that are not frozen; in a Hybrid, add a rule with "
            "optimizer = 'muon', or confirm with a last rule (match = '*', optimizer = 'adamw')"
        )


def start_max(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start an in-place maximum over a group (default: all); None for a single rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
