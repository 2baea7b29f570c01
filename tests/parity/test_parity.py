"""Every row of the table holds on every rank, and so do random rows."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import World
from tests.parity.checkpoints import Chain, chains, continued
from tests.parity.layouts import MATRICES, ODD, ODD_STACKS, STACKS
from tests.parity.table import FOUR, rows
from tests.parity.training import DROP, Row, Training, differences
from titan_muon.options import Machine


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_row_has_the_bits_of_its_reference(row: Row, worlds: dict[int, World]) -> None:
    different = worlds[row.world].run(differences, row)
    assert not any(different), f"{row}: {different}"


@pytest.mark.parametrize("chain", chains(), ids=str)
def test_a_chain_of_checkpoints_has_the_bits_of_its_reference(
    chain: Chain, worlds: dict[int, World], tmp_path: Path
) -> None:
    for number, (size, layout, options) in enumerate(chain.stages):
        layouts = (layout,) if isinstance(layout, str) else layout
        row = replace(chain.row, world=size, layouts=layouts, options=options)
        folders = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        different = worlds[size].run(continued, row, chain.titan, number, *folders)
        assert not any(different), f"{chain}, {layout} on {size} ranks: {different}"


# --- random rows: layouts, options and faults together; `make test-long` has more seeds ---


SEEDS = 8 * int(os.environ.get("TITAN_MUON_LONG", "1"))
ACTIONS = ("swap_data", "reload", "new_optimizer", "check")


def row_of(seed: int) -> Row:
    draw = random.Random(seed)
    layouts = tuple(draw.choice((*FOUR, "tp rows", "tp x ep", "fsdp beside tp")) for _ in range(draw.randint(1, 3)))
    shapes = tuple(draw.sample([*MATRICES, *STACKS, *ODD], draw.randint(2, 4)))
    exchange = draw.choice(("all_to_all", "all_to_all", "all_gather", "all_gather_reduce_scatter"))
    options: dict[str, Any] = {
        "exchange": exchange,
        "replicas": draw.choice(("split", "redundant")),
        "state": draw.choice(("replicated", "replicated", "owner")),
        "offload": draw.choice(("none", "none", "state")),
        "on_bad_gradient": "skip_step",
        "release_grads": draw.random() < 0.3,
        "keep_buffers": draw.random() < 0.3,
        "buffer_gib": draw.choice(("auto", "auto", 20_000 / 2**30)),
    }
    return Row(
        f"seed {seed}",
        4,
        layouts,
        shapes,
        options,
        math={"nesterov": draw.random() < 0.7},
        gradients={draw.choice((0, 1)): (draw.choice(shapes), draw.choice((DROP, torch.nan, 0.0)))},
        between={draw.choice((0, 1)): draw.choice(ACTIONS)},
    )


def hopping_row_of(seed: int) -> Row:
    """Two hops through two nodes."""
    row = row_of(seed)
    hops = {"exchange": "two_hops", "machine": Machine(ranks_per_node=2), "replicas": "split", "state": "replicated"}
    return replace(row, layouts=("fsdp", *row.layouts), options={**row.options, **hops})


def bfloat16_row_of(seed: int) -> Row:
    """bfloat16 weights without stochastic rounding, in odd stacks with replicas."""
    row, draw = row_of(seed), random.Random(seed)
    return replace(
        row,
        layouts=tuple(dict.fromkeys((draw.choice(("plain", "replicated", "hsdp")), *row.layouts))),
        shapes=(*ODD_STACKS, *row.shapes[:2]),
        reference="one process",
        math={**row.math, "rounding": "nearest", "cautious": draw.random() < 0.3},
        gradients={},
        dtype=torch.bfloat16,
    )


def differences_unless_refused(rank: int, world_size: int, row: Row) -> list[str]:
    training = Training(row)
    try:
        training.muon.build().close()
    except ValueError as error:
        return [f"refused: {error}"]
    return differences(rank, world_size, row)


@pytest.mark.parametrize("made", [row_of, hopping_row_of, bfloat16_row_of])
def test_random_rows_have_the_bits_of_the_reference(worlds: dict[int, World], made: Callable[[int], Row]) -> None:
    refused = 0
    for seed in range(SEEDS):
        row = made(seed)
        different = worlds[4].run(differences_unless_refused, row)
        is_refused = all(texts and texts[0].startswith("refused") for texts in different)
        assert is_refused or not any(different), f"{row}: {different}"
        refused += is_refused
    assert refused < SEEDS / 2 + 1
