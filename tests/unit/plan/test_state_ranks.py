"""Keepers of replicated momentum: each momentum once in the world, on ranks with a send to the owner."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from tests.unit.plans import examples, mesh_of, parameter_lists, parameter_of, ranks_of, work
from titan_muon.engine.layout.types import Parameter, Plan, Replicate, Separate, Shard
from titan_muon.engine.program.program import make_program
from titan_muon.options import MuonOptions
from titan_muon.planner.owners import momentum_ranks, state_elements, with_state_ranks
from titan_muon.planner.planner import make_plan

OWNER = MuonOptions(state="owner", wire_dtype="float32")
DDP = mesh_of(4), Replicate()
HSDP = mesh_of(2, 2), Replicate(), Shard(0)


def kept_on_owners(parameters: list[Parameter]) -> Plan:
    return make_plan(with_state_ranks(parameters, OWNER, work, {}), work, OWNER)


def advanced(plan: Plan, rank: int) -> Counter[int]:
    """Elements of momentum advanced by a rank in a step, by parameter: the packed elements under `state = "owner"`."""
    program, elements = make_program(plan, rank), Counter[int]()
    for run in program.buckets:
        for parcel in run.stored:
            if not plan.parameters[plan.matrices[parcel.matrix].parameter].state_ranks:
                elements[plan.matrices[parcel.matrix].parameter] += parcel.piece.numel
        for parcel in run.gathering.home:
            if plan.parameters[plan.matrices[parcel.matrix].parameter].state_ranks:
                elements[plan.matrices[parcel.matrix].parameter] += parcel.piece.numel
    return elements


@examples(50)
@given(parameter_lists())
def test_every_momentum_is_kept_once_on_the_advancing_rank(parameters: list[Parameter]) -> None:
    plan = kept_on_owners([entry for entry in parameters if not entry.separate])
    kept, total = state_elements(plan), Counter[int]()
    for rank in ranks_of(plan):
        assert advanced(plan, rank) == +Counter(kept[rank])
        total.update(kept[rank])
    for number, entry in enumerate(plan.parameters):
        assert total[number] == sum(m.numel for m in plan.matrices if m.parameter == number), entry.fqn


@pytest.mark.parametrize("placed", [DDP, HSDP], ids=["ddp", "hsdp"])
def test_momentum_is_divided_as_evenly_as_matrices_can_be(placed: tuple[Any, ...]) -> None:
    plan = kept_on_owners([parameter_of(f"layers.{index}.w", (8, 16), *placed) for index in range(12)])
    assert {sum(held.values()) for held in state_elements(plan).values()} == {12 * 8 * 16 // 4}


def test_small_cheap_matrices_are_balanced_by_bytes() -> None:
    """By FLOPs alone, none would be on the large matrix's rank."""
    shapes = [(64, 64), *[(1, 256)] * 32]
    plan = kept_on_owners([parameter_of(f"layers.{i}.w", shape, *DDP) for i, shape in enumerate(shapes)])
    held = [sum(elements.values()) for elements in state_elements(plan).values()]
    assert max(held) <= 1.5 * sum(held) / len(held)


@pytest.mark.parametrize(("experts", "parts"), [(8, [2, 2, 2, 2]), (10, [3, 3, 3, 1]), (5, [2, 2, 1]), (2, [1, 1])])
def test_a_stack_is_kept_in_chunks_of_whole_experts_on_the_owners(experts: int, parts: list[int]) -> None:
    plan = kept_on_owners([parameter_of("experts", (experts, 4, 6), *DDP)])
    ranks, kept = plan.parameters[0].state_ranks, state_elements(plan)
    assert len(set(ranks)) == len(parts)
    assert [kept[rank][0] // 24 for rank in ranks] == parts
    owners = [momentum_ranks(plan.parameters[0], expert) for expert in range(experts)]
    assert owners == [(rank,) for rank, part in zip(ranks, parts, strict=True) for _ in range(part)]


def test_keepers_stay_when_the_step_is_planned_again() -> None:
    planned = with_state_ranks([parameter_of(name, (8, 8), *DDP) for name in "abcd"], OWNER, work, {})
    kept = {entry.fqn: entry.state_ranks for entry in planned}
    more = [parameter_of("z", (16, 16), *DDP), *(replace(entry, state_ranks=()) for entry in planned)]
    again = {entry.fqn: entry.state_ranks for entry in with_state_ranks(more, OWNER, work, kept)}
    assert {name: again[name] for name in kept} == kept
    assert len(again["z"]) == 1


def test_a_rank_keeps_the_momentum_of_rank_specific_matrices() -> None:
    own = parameter_of("own", (8, 8), DDP[0], Separate())
    plan = kept_on_owners([own, parameter_of("copy", (8, 8), *DDP)])
    assert plan.parameters[0].state_ranks == ()
    assert [held[0] for held in state_elements(plan).values()] == [64] * 4
