"""Sliced matrices: a team of owners orthogonalizes a matrix, slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.collectives import Collectives, finish
from ..orthogonalize import TeamSlice, orthogonalize, sliced_norms
from ..step.batch import Batch
from ..step.feature import Feature
from ..step.stages import BucketRun, RankStages, Stages


@dataclass(frozen=True)
class SliceBatch(Batch):
    """`whole` is (1, rows, cols)."""

    slice: TeamSlice

    def norms(self) -> Tensor:
        return sliced_norms(self.whole, self.slice.team)

    def orthogonalize(self, norms: Tensor) -> None:
        orthogonalize(self.whole, self.iteration, self.method, norms=norms, out=self.whole, of=self.slice)


class SliceTeam:
    """The owners of a matrix's slices, for `orthogonalize.sliced`. `ranks`: in the order of the slices, ascending."""

    # Teams share ranks, but cannot deadlock, because every rank runs its teams in the same order: turns of the program,
    # buckets of a round, numbers of matrices.

    def __init__(self, ranks: tuple[int, ...], rank: int, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self.place, self._size = ranks.index(rank), len(ranks)
        self._collectives, self._group = collectives, group

    def summed(self, whole: Tensor) -> Tensor:
        part = whole.new_empty(whole.size(0) // self._size, whole.size(1))
        splits = [part.numel()] * self._size
        finish(self._collectives.reduce_scatter(part.view(-1), splits, whole.view(-1), self._group))
        return part

    def gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(self._size * part.size(0), *part.shape[1:])
        splits = [part.numel()] * self._size
        finish(self._collectives.all_gather(whole.view(-1), splits, part.view(-1), self._group))
        return whole


class Slices(Feature):
    """Orthogonalizes slices in teams."""

    def __init__(self, rank: RankStages, agreement: Agreement) -> None:
        program = rank.program
        self.teams: Mapping[int, SliceTeam] = {
            matrix: SliceTeam(ranks, program.rank, rank.exchange.collectives, agreement.group(ranks))
            for matrix, ranks in program.teams.items()
        }

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        rank.runs = tuple(self._with_teams(run, rank) for run in rank.runs)
        return stages

    def _with_teams(self, run: BucketRun, rank: RankStages) -> BucketRun:
        runs = []
        for batch_run in run.batches:
            batch = batch_run.batch
            cut = rank.plan.matrices[batch.matrices[0]].slice
            if cut is not None:
                team_slice = TeamSlice(self.teams[batch.matrices[0]], cut.cuts_rows)
                fields = (batch.matrices, batch.whole, batch.parameters, batch.iteration, batch.method)
                batch_run = replace(batch_run, batch=SliceBatch(*fields, team_slice))
            runs.append(batch_run)
        return replace(run, batches=tuple(runs))
