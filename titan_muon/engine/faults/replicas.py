"""Detection of replicas and of separate tensors of one name."""

# [Note: replicas of plain tensors]
# - Plain tensors of one name are replicas under DDP, but not in custom tensor parallelism or in an ensemble. So ranks
#   compare the values at construction, and train different tensors separately.
# - `mesh["dp"]` of a dp x tp mesh is a different mesh on each tp rank. Tensors of one name on these meshes may differ,
#   as experts do. So each mesh orthogonalizes its own tensor. The plan has all meshes, to be equal on all ranks.
# - Replicas diverge later if gradients are not reduced. Each step compares gradient sizes in the collective for faults.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..exchange.agreement import Agreement
from ..layout.intervals import check_rows, components
from ..layout.types import Interval, Layout, Mesh, Separate
from ..tensors.dtensor import layout_of, local, own_rows
from ..tensors.names import warn
from ..tensors.storage import TrainedParam

INTEGERS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def separate_layouts(params: Sequence[TrainedParam], agreement: Agreement) -> Mapping[str, Layout]:
    """Layouts of plain tensors with unequal values on ranks or on only some ranks, and of DTensors on several meshes.

    Layouts whose placements do not tell the rows have the rows of all ranks. By name. Collective. Raises ValueError on
    all ranks for meshes that cannot share a plan, or with other ranks, and for rows missing or stored twice.
    """
    agreement.raise_on_all_ranks(lambda: _check_meshes(params, agreement.ranks))
    plain = {t.fqn: t.param for t in params if not isinstance(t.param, DTensor)}
    contents = {fqn: (tuple(plain[fqn].shape), str(plain[fqn].dtype), total) for fqn, total in bit_sums(plain).items()}
    placed: dict[Layout, list[str]] = {}
    for trained in params:
        placed.setdefault(layout_of(trained.fqn, trained.param, agreement.ranks), []).append(trained.fqn)
    rows = {t.fqn: interval for t in params if (interval := own_rows(t.param)) is not None}
    reports = agreement.distinct((contents, placed, bool(rows)))
    own = [fqn for fqn, value in contents.items() if any(values.get(fqn) != value for values, *_ in reports)]
    if own:
        warn(
            f"{', '.join(sorted(own)[:5])}: plain tensors whose values differ between ranks; each rank orthogonalizes "
            "its own. If the tensors should be replicas, build Muon after DistributedDataParallel has made them equal"
        )
    separate = {
        fqn: replace(layout, placements=(Separate(),)) if fqn in own else layout
        for layout, names in placed.items()
        for fqn in names
        if fqn in plain
    }
    separate |= {
        fqn: layout
        for fqn, layout in _on_several_meshes([layouts for _, layouts, _ in reports])
        if agreement.rank in layout.mesh.ranks
    }
    if not any(has_rows for *_, has_rows in reports):
        return separate
    everywhere = agreement.gathered(rows)
    return separate | agreement.raise_on_all_ranks(
        lambda: dict(_with_rows(params, agreement.ranks, separate, everywhere))
    )


def _with_rows(
    params: Sequence[TrainedParam],
    ranks: Sequence[int],
    layouts: Mapping[str, Layout],
    everywhere: Mapping[int, Mapping[str, Interval]],
) -> Iterator[tuple[str, Layout]]:
    """(name, layout) of each DTensor with rows of its own on some rank. `everywhere`: the rows by rank."""
    for fqn, layout in [(t.fqn, layouts.get(t.fqn, layout_of(t.fqn, t.param, ranks))) for t in params]:
        stored = [everywhere[rank].get(fqn) for rank in layout.mesh.ranks]
        rows = tuple(interval for interval in stored if interval is not None)
        if not rows:
            continue
        try:
            if len(rows) < len(stored):
                raise ValueError("its rows are set on some ranks alone; set the rows on every rank of its mesh")
            uneven = replace(layout, rows=rows)
            check_rows(uneven)
        except ValueError as error:
            raise ValueError(f"{fqn}: {error}") from error
        yield fqn, uneven


def _check_meshes(params: Sequence[TrainedParam], ranks: Sequence[int]) -> None:
    for trained in params:
        outside = sorted({*layout_of(trained.fqn, trained.param, ranks).mesh.ranks} - {*ranks})
        if outside:
            raise ValueError(
                f"{trained.fqn}: its mesh has ranks {outside}, which are not in process_group, with ranks "
                f"{list(ranks)}; pass a group of all ranks of the mesh, or no process_group for all ranks"
            )


def _on_several_meshes(reports: Sequence[Mapping[Layout, Sequence[str]]]) -> Iterator[tuple[str, Layout]]:
    """(name, layout over all meshes) of each DTensor on several disjoint meshes of connected ranks."""
    # Towers and pipeline stages on separate ranks may have equal names, and keep separate plans.
    connected = components([rank for layout in report for rank in layout.mesh.ranks] for report in reports if report)
    layouts_of: dict[tuple[str, tuple[int, ...]], dict[Layout, None]] = {}
    for report in reports:
        for layout, names in report.items():
            for fqn in names:
                layouts_of.setdefault((fqn, connected[layout.mesh.ranks[0]]), {})[layout] = None
    for (fqn, _), layouts in layouts_of.items():
        ranks = [rank for layout in layouts for rank in layout.mesh.ranks]
        # The comparison of plans names overlapping meshes.
        if len(layouts) == 1 or len(ranks) > len(set(ranks)):
            continue
        first, *others = sorted(layouts, key=lambda layout: layout.mesh.ranks)
        for other in others:
            if other.mesh.shape != first.mesh.shape or replace(other, mesh=first.mesh) != first:
                raise ValueError(
                    f"{fqn}: has shape {first.shape} and placements {first.placements} on mesh {first.mesh}, but shape "
                    f"{other.shape} and placements {other.placements} on mesh {other.mesh}; build a Muon for each mesh"
                )
        mesh = Mesh((len(layouts), *first.mesh.shape), tuple(r for each in (first, *others) for r in each.mesh.ranks))
        yield fqn, replace(first, mesh=mesh, placements=(Separate(), *first.placements))


def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The `bit_sum` of each tensor's local part, with one transfer per device."""
    sums = {label: bit_sum(local(tensor)) for label, tensor in tensors.items()}
    numbers: dict[str, int] = {}
    for device in dict.fromkeys(total.device for total in sums.values()):
        labels = [label for label, total in sums.items() if total.device == device]
        numbers |= zip(labels, torch.stack([sums[label] for label in labels]).tolist(), strict=True)
    return {label: numbers[label] for label in tensors}


def bit_sum(tensor: Tensor) -> Tensor:
    """A weighted sum of the bits, () int64. Any changed bit changes the sum."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.int64))
    # Row weights distinguish permutations of the rows. Odd weights lose no bit modulo 2^64.
    rows = bits.sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * rows.numel() + 1, 2, device=rows.device).view(rows.shape)
    return (rows * weights).sum()
