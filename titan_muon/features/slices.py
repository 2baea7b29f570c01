"""Sliced matrices: a team of owners orthogonalizes a matrix, slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch import Tensor

from ..comm.exchange import Collectives, wait_all
from ..orthogonalize import TeamSlice, orthogonalize, sliced_norms
from ..step.rank import Rank
from ..step.views import Batch


@dataclass(eq=False)
class SliceBatch(Batch):
    """`whole` is (1, rows, cols)."""

    slice: TeamSlice

    def norms(self) -> Tensor:
        return sliced_norms(self.whole, self.slice.team)

    def orthogonalize(self, norms: Tensor) -> None:
        orthogonalize(self.whole, self.iteration, self.method, norms=norms, out=self.whole, of=self.slice)


class SliceTeam:
    """The owners of a matrix's slices, for `orthogonalize`. `ranks`: in the order of the slices, ascending."""

    # Teams share ranks, but cannot deadlock, because every rank runs its teams in the same order: turns of the program,
    # buckets of a round, numbers of matrices.

    def __init__(self, ranks: tuple[int, ...], rank: int, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self.place, self._size = ranks.index(rank), len(ranks)
        self._collectives, self._group = collectives, group

    def summed(self, whole: Tensor) -> Tensor:
        part = whole.new_empty(whole.size(0) // self._size, whole.size(1))
        splits = [part.numel()] * self._size
        wait_all(self._collectives.reduce_scatter(part.view(-1), splits, whole.view(-1), self._group))
        return part

    def gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(self._size * part.size(0), *part.shape[1:])
        splits = [part.numel()] * self._size
        wait_all(self._collectives.all_gather(whole.view(-1), splits, part.view(-1), self._group))
        return whole


class SliceBatches:
    """Gives each batch of a slice its team."""

    def __init__(self, rank: Rank) -> None:
        self._matrices = rank.plan.matrices
        self._teams: Mapping[int, SliceTeam] = {
            matrix: SliceTeam(ranks, rank.program.rank, rank.exchange.collectives, rank.agreement.group(ranks))
            for matrix, ranks in rank.program.teams.items()
        }

    def __call__(self, batch: Batch) -> Batch:
        cut = self._matrices[batch.matrices[0]].slice
        if cut is None:
            return batch
        team_slice = TeamSlice(self._teams[batch.matrices[0]], cut.cuts_rows)
        return SliceBatch(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, slice=team_slice)
