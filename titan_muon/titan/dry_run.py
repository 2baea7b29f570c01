"""`--dry-run`: what training a recipe would do, printed: the recipe, who takes which parameter, the plan, memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP

from titan_muon.layouts import local
from titan_muon.plan import Summary, summarize
from titan_muon.titan.blueprint import Blueprint, draw, smallest_world
from titan_muon.titan.explain import optimizer_lines, parameter_table, plan_lines
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml

AVERAGES = {"adamw": 2, "adam": 2}
"""Tensors of a parameter's shape and dtype that an optimizer keeps. Muon's one has a dtype of its own."""


def report(recipe: Recipe, world_size: int | None, *, full: bool, json: str | None) -> None:
    """Print what training would do on `world_size` ranks, by default the fewest that the degrees fit on.

    `full` lists every parameter instead of one line for all layers; `json` is a file for the numbers. Raises
    RecipeError as training would.
    """
    world = smallest_world(recipe) if world_size is None else world_size
    blueprint = draw(recipe, world)
    summary = None if blueprint.plan is None else summarize(blueprint.plan)
    memory = memory_per_rank(blueprint, summary, recipe.muon.state_dtype)
    print(to_toml(recipe))
    print(parameter_table(blueprint.assigned, blueprint.parameters, blueprint.plan, full=full))
    counts = optimizer_lines(blueprint.assigned, blueprint.plan, world)
    print("\n".join(["", *counts, "", *plan_lines(blueprint.plan, summary), "", *_memory_lines(memory)]))
    if json is not None:
        _write(Path(json), blueprint, summary, memory)


@dataclass(frozen=True)
class Memory:
    """Bytes of rank 0, which holds the largest shards; activations and gathered parameters are not counted.

    `uncounted` names the optimizers, registered by others, whose states are unknown.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int
    orthogonalization: int
    uncounted: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """What is counted, by its name, and the total."""
        counted = {name: size for name, size in asdict(self).items() if name != "uncounted"}
        return {**counted, "total": sum(counted.values())}


def memory_per_rank(blueprint: Blueprint, summary: Summary | None, state_dtype: str) -> Memory:
    """What rests in memory on rank 0 between steps, and the exchange's buffers. `state_dtype` is of Muon's momentum."""
    shards = {name: local(parameter) for name, parameter in blueprint.parameters.items()}
    held = sum(shard.nbytes for shard in shards.values())
    momentum_bytes = TORCH_DTYPE_MAP[state_dtype].itemsize
    states = 0
    for a in blueprint.assigned:
        shard = shards[a.fqn]
        states += (
            momentum_bytes * shard.numel() if a.optimizer == "muon" else AVERAGES.get(a.optimizer, 0) * shard.nbytes
        )
    uncounted = sorted({a.optimizer for a in blueprint.assigned} - {"muon", *AVERAGES})
    step = (0, 0) if summary is None else (summary.buffer_bytes_max, summary.work_bytes_max)
    return Memory(held, held, states, *step, tuple(uncounted))


def _memory_lines(memory: Memory) -> Iterable[str]:
    yield "memory per rank, without activations"
    for name, size in memory.sizes.items():
        yield f"  {name.replace('_', ' '):<18}{size / 2**20:>12,.1f} MiB"
    for name in memory.uncounted:
        yield f"  the states of {name} are not counted: only the package that registered it knows their size"


def _write(path: Path, blueprint: Blueprint, summary: Summary | None, memory: Memory) -> None:
    document = {
        "world_size": blueprint.world_size,
        "parameters": [asdict(assignment) for assignment in blueprint.assigned],
        "memory": {**memory.sizes, "uncounted_optimizers": memory.uncounted},
        **({} if summary is None else asdict(summary)),
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"--json {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error
    print(f"\nwrote {path}")
