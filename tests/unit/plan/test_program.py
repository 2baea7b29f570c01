"""Any plan gathers every matrix exactly once and returns it: all ranks of random plans in one process."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.unit.plans import (
    EXCHANGES,
    FLAT,
    coordinates,
    elements_of,
    examples,
    mesh_of,
    parameter_of,
    plan_of,
    plans,
    ranks_of,
    torch_local,
)
from titan_muon.engine.exchange.exchange import bucket_buffers
from titan_muon.engine.layout.intervals import Geometries, Span, spans
from titan_muon.engine.layout.types import Parameter, Plan, Separate, Shard
from titan_muon.engine.program.phases import Act, BucketProgram, Collective
from titan_muon.engine.program.program import make_program

GATHER, RETURN, SPREAD = "gather", "return", "spread"
HOPS = {GATHER: (("home", "arriving"), ("departing", "owned")), RETURN: (("owned", "departing"), ("arriving", "home"))}
"""The buffers that each of two hops sends and receives."""
SEPARATE = 10**6
"""Tensors of one name on separate coordinates differ by multiples of this value."""


class Call(NamedTuple):
    """A rank's side of a collective."""

    key: tuple[int, str, object, tuple[int, ...]]  # Bucket, direction, buffers and ranks.
    parts: list[Tensor]  # To each rank.
    output: Tensor
    splits: tuple[int, ...]  # Expected elements from each rank; empty if the parts are summed.


def numbered(plan: Plan) -> list[Tensor]:
    """Every parameter in full, as 2D views; no number occurs twice or is 0, and none is above SEPARATE."""
    full, seen = [], 1
    for parameter in plan.parameters:
        shape, split = parameter.layout.shape, parameter.stack.row_dims
        values = torch.arange(seen, seen + prod(shape), dtype=torch.float64)
        full.append(values.view(prod(shape[:split]), prod(shape[split:])))
        seen += prod(shape)
    return full


def whole(plan: Plan, full: list[Tensor], matrix: int) -> Tensor:
    place = plan.matrices[matrix]
    return elements_of(full[place.parameter], plan.parameters[place.parameter].stack.matrices[place.index])


def orthogonalized(matrix: Tensor) -> Tensor:
    """Stand-in for Newton-Schulz: a number with the element's origin."""
    return 2 * matrix + 1


class World:
    """All ranks of a plan, each with the buffers of exchange.Slot, and the collectives in between.

    The output of a collective is NaN from launch to completion: the first wait of a rank after all have launched. The
    ranks of a group launch its collectives in one order, because others would take wrong pieces, or hang.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.full = plan, numbered(plan)
        self.launched: dict[object, dict[int, Call]] = {}
        self.orders = defaultdict[tuple[int, ...], dict[int, list[object]]](lambda: defaultdict(list))
        self.done: set[object] = set()
        self.work: Counter[tuple[int, int]] = Counter()
        self.geometries = Geometries(plan.parameters)
        self.ranks = {rank: Rank(self, rank) for rank in ranks_of(plan)}

    def run(self) -> None:
        running = {rank: member.step() for rank, member in self.ranks.items()}
        while running:
            before = self._progress()
            for rank, steps in list(running.items()):
                if not any(not self._is_finished(call) for call in steps):
                    del running[rank]
            assert self._progress() != before or not running, f"ranks {list(running)} wait for each other"
        for group, orders in self.orders.items():
            assert all(orders[rank] == orders[group[0]] for rank in group), group

    def _progress(self) -> tuple[int, int]:
        return sum(len(ranks) for ranks in self.launched.values()), len(self.done)

    def launch(self, rank: int, call: Call) -> None:
        self.launched.setdefault(call.key, {})[rank] = call
        self.orders[call.key[-1]][rank].append(call.key)
        call.output.fill_(torch.nan)

    def _is_finished(self, call: Call) -> bool:
        launched, ranks = self.launched.get(call.key, {}), call.key[-1]
        if call.key not in self.done and launched.keys() == {*ranks}:
            self.done.add(call.key)
            calls = [launched[rank] for rank in ranks]
            sent = [[part.clone() for part in call.parts] for call in calls]
            for place, receiver in enumerate(calls):
                received = [parts[place] for parts in sent]
                receiver.output.copy_(torch.cat(received) if receiver.splits else torch.stack(received).sum(0))
                assert not receiver.splits or tuple(map(len, received)) == receiver.splits
        return call.key in self.done


class Rank:
    """A rank: the storage by PyTorch's shards, and the order of Muon.step."""

    def __init__(self, world: World, rank: int) -> None:
        plan = world.plan
        self.world, self.plan, self.rank = world, plan, rank
        self.full = []
        for number, full in enumerate(world.full):
            coordinate = world.geometries[number].tensor.get(rank, ())
            self.full.append(full + SEPARATE * sum(index * 10**axis for axis, index in enumerate(coordinate)))
        self.local: BucketProgram | None = None
        self.program = make_program(plan, rank, world.geometries)
        self.buckets = [index for index, bucket in enumerate(plan.buckets) if rank in bucket.group]
        dtypes = [torch.float64] * len(self.program.buckets)
        made = bucket_buffers(self.program, torch.device("cpu"), dtypes)
        self.buffers = [buffers for buffers in made if buffers is not None]
        for buffers in self.buffers:
            buffers.block.view(torch.float64).fill_(torch.nan)
        self.stored = [self._stored(*pair) for pair in zip(plan.parameters, self.full, strict=True)]
        self.momenta = [torch.zeros_like(stored) for stored in self.stored]
        self.updates = [torch.zeros_like(stored) for stored in self.stored]

    def _stored(self, parameter: Parameter, full: Tensor) -> Tensor:
        layout, split = parameter.layout, parameter.stack.row_dims
        coordinate = dict(coordinates(layout.mesh)).get(self.rank)
        if coordinate is None:
            return full[:0]
        local = torch_local(layout, coordinate, full.view(layout.shape))
        return local.reshape(prod(local.shape[:split]), prod(local.shape[split:]))

    def step(self) -> Iterator[Call]:
        """Run a BucketProgram to the end; finishes each awaited collective."""
        for act, index in self.program.acts:
            if self.program.buckets[index].local:
                self._local(act, self.program.buckets[index])
            elif act is Act.GATHER:
                yield from self._gather(index)
            elif act is Act.ORTHOGONALIZE:
                yield from self._orthogonalize(index)
            else:
                yield from self._apply(index)

    def _local(self, act: Act, run: BucketProgram) -> None:
        """A batch of local matrices, finished before the next, because all share a workspace."""
        assert not any(phase.travels for phase in run.phases)
        assert run.matrices == tuple(item.matrix for item in run.stored)
        if act is Act.GATHER:
            assert self.local is None
            self.local = run
        assert self.local is run
        for item in run.stored:
            place = self.plan.matrices[item.matrix]
            assert item.piece.shape == (place.rows, place.cols)
            if act is Act.GATHER:
                self._momentum(item.matrix, spans(item.piece), None)
            elif act is Act.ORTHOGONALIZE:
                self.world.work[item.matrix, self.rank] += 1
            else:
                full = whole(self.plan, self.full, item.matrix)
                self._update(item.matrix, spans(item.piece), orthogonalized(full))
        if act is Act.APPLY:
            self.local = None

    def _gather(self, index: int) -> Iterator[Call]:
        buffers = self.buffers[index]
        for piece in buffers.stored:
            self._momentum(piece.matrix, piece.spans, buffers.packed.get(piece.matrix))
        yield from self._send(index, GATHER)

    def _send(self, index: int, which: str) -> Iterator[Call]:
        first, *others = self._calls(index, which)
        self.world.launch(self.rank, first)
        for second in others:
            # On gloo the host waits between the hops.
            yield from self._wait(first)
            passed = self.buffers[index].passed
            ends = (passed.leaving, passed.arrived) if which == GATHER else (passed.arrived, passed.leaving)
            for target, source in zip(*ends, strict=True):
                target.copy_(source)
            self.world.launch(self.rank, second)

    def _wait(self, call: Call) -> Iterator[Call]:
        while call.key not in self.world.done:
            yield call

    def _calls(self, index: int, which: str) -> list[Call]:
        """This rank's collectives of a direction: one, or two hops."""
        run, buffers, bucket = self.program.buckets[index], self.buffers[index], self.buckets[index]
        phase = {GATHER: run.gathering, RETURN: run.returning, SPREAD: run.replica_gather}[which]
        home, passed = buffers.home[phase.kept :], buffers.passed
        if (hop := phase.hop) is not None:
            sides = {
                "home": (home, phase.home_splits),
                "arriving": (passed.arriving, hop.arriving_splits),
                "departing": (passed.departing, hop.departing_splits),
                "owned": (buffers.results if which == RETURN else buffers.inbox, phase.owned_splits),
            }
            groups = {"home": hop.rail, "departing": hop.node, "owned": hop.node, "arriving": hop.rail}
            return [
                Call((bucket, which, names, groups[names[0]]), parts_of(*sides[names[0]]), *received(*sides[names[1]]))
                for names in HOPS[which]
            ]
        key = bucket, which, None, phase.group
        if which == RETURN:
            summed = self.plan.buckets[bucket].exchange == "all_gather_reduce_scatter"
            output = (buffers.home[: phase.home_numel], ()) if summed else received(home, phase.home_splits)
            return [Call(key, parts_of(buffers.results, phase.owned_splits), *output)]
        if phase.collective is Collective.ALL_GATHER:
            parts = [buffers.home[: phase.home_numel]] * len(phase.group)
        else:
            parts = parts_of(home, phase.home_splits)
        return [Call(key, parts, *received(buffers.shared if which == SPREAD else buffers.inbox, phase.owned_splits))]

    def _orthogonalize(self, index: int) -> Iterator[Call]:
        yield from self._wait(self._calls(index, GATHER)[-1])
        run, buffers = self.program.buckets[index], self.buffers[index]
        if buffers.cleared is not None:
            buffers.cleared.zero_()
        for matrix in run.matrices:
            expected = whole(self.plan, self.full, matrix)
            result = torch.full_like(expected, torch.nan)
            for source in buffers.sources[matrix]:
                for span in source.spans:
                    result[span.whole].copy_(source.view[span.piece])
            assert torch.equal(result, expected), f"matrix {matrix} is not whole on rank {self.rank}"
            self.world.work[matrix, self.rank] += 1
            for target in buffers.targets[matrix]:
                for span in target.spans:
                    target.view[span.piece].copy_(orthogonalized(result)[span.whole])
        if run.returning is not None:
            yield from self._send(index, RETURN)
        if run.replica_gather is not None:
            yield from self._wait(self._calls(index, RETURN)[-1])
            yield from self._send(index, SPREAD)

    def _apply(self, index: int) -> Iterator[Call]:
        run = self.program.buckets[index]
        if run.returning is not None:
            yield from self._wait(self._calls(index, RETURN if run.replica_gather is None else SPREAD)[-1])
        for piece in self.buffers[index].stored:
            self._update(piece.matrix, piece.spans, piece.view, packed=True)

    def _momentum(self, matrix: int, places: Sequence[Span], into: Tensor | None) -> None:
        parameter = self.plan.matrices[matrix].parameter
        for span in places:
            self.momenta[parameter][span.local] += 1
            if into is not None:
                into[span.piece].copy_(self.stored[parameter][span.local])

    def _update(self, matrix: int, places: Sequence[Span], delta: Tensor, packed: bool = False) -> None:
        parameter = self.plan.matrices[matrix].parameter
        for span in places:
            self.updates[parameter][span.local] += delta[span.piece if packed else span.whole]


def received(buffer: Tensor, splits: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    return buffer[: sum(splits)], splits


def parts_of(buffer: Tensor, splits: tuple[int, ...]) -> list[Tensor]:
    return list(buffer[: sum(splits)].split(list(splits)))


def check_step(plan: Plan) -> World:
    """Run a step of all ranks: every stored element gets one momentum and the right orthogonalized value, once."""
    world = World(plan)
    world.run()
    for rank in world.ranks.values():
        for stored, momentum, update in zip(rank.stored, rank.momenta, rank.updates, strict=True):
            assert torch.equal(momentum, torch.ones_like(stored)), "each stored element enters once"
            assert torch.equal(update, orthogonalized(stored)), "each stored element is updated once, with its own"
    return world


def check_owners(world: World) -> None:
    """The ranks of each matrix: the owner, once per group; or all holders redundantly."""
    plan, expected = world.plan, Counter[tuple[int, int]]()
    for index, matrix in enumerate(plan.matrices):
        expected.update((index, rank) for rank in plan.local[index])
        holders = world.geometries[matrix.parameter].elements(matrix.index)
        mesh = plan.parameters[matrix.parameter].layout.mesh
        for bucket in plan.buckets:
            assert set(bucket.owners) <= set(bucket.group)
            for number, member in enumerate(bucket.matrices):
                if member == index:
                    assert not plan.local[index], "a matrix at home does not travel"
                    assert set(bucket.group) <= set(mesh.ranks), "a group is part of the matrix's mesh"
                    owners = [bucket.owners[number]] if bucket.owners else [r for r in holders if r in bucket.group]
                    expected.update((index, rank) for rank in owners)
    assert world.work == expected


@examples(250)
@given(plans(overlaps=("none", "forward")))
def test_every_matrix_is_whole_once_and_every_holder_gets_a_result(plan: Plan) -> None:
    check_owners(check_step(plan))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_uneven_shards_of_rows_are_sent_from_multiples_of_16_bytes(exchange: str) -> None:
    """Without gaps, because a row of 8 bfloat16 elements has 16 bytes."""
    ranks = 12
    mesh = mesh_of(ranks)
    shapes = [(13, 8), (8, 24), (64, 40), (100, 16)]
    parameters = [parameter_of(f"{rows}", (rows, cols), mesh, Shard(0)) for rows, cols in shapes]
    plan = plan_of(parameters, exchange=exchange)
    phases = [phase for rank in range(ranks) for run in make_program(plan, rank).buckets for phase in run.phases]
    parcels = [parcel for phase in phases for parcel in (*phase.home, *phase.owned)]
    assert len({parcel.piece.numel for parcel in parcels}) > 2
    assert {parcel.offset % 8 for parcel in parcels} == {0}


def test_every_rank_orthogonalizes_the_local_plain_tensors() -> None:
    plain = replace(parameter_of("p", (4, 4), FLAT, Separate()), plain=True)
    assert check_step(plan_of([plain])).work == Counter({(0, rank): 1 for rank in range(4)})
