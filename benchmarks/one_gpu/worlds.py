"""Parameters of recipes on many ranks as data, so that one rank can be played without TorchTitan.

    python -m benchmarks.one_gpu.worlds         # writes worlds.json anew from the recipes; needs TorchTitan, a minute

Layers with equal parameters are one entry of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("worlds.json")
LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Source:
    """A recipe of configs/, its world size, and overrides."""

    recipe: str
    world: int
    overrides: tuple[str, ...] = ()


SOURCES: Mapping[str, Source] = {
    "tiny": Source("qwen_moe", 8, ("--parallelism.expert_parallel_degree", "2")),
    "qwen3_8b": Source("qwen3_8b", 64),
    "qwen3_30b_a3b": Source("qwen3_30b_a3b", 64, ("--parallelism.expert_parallel_degree", "8")),
    "kimi_k2": Source("kimi_k2", 256, ("--parallelism.expert_parallel_degree", "64")),
}


@dataclass(frozen=True)
class Row:
    """A parameter: name, shape, index of the mesh (None for a plain tensor), placements, optimizer, and group."""

    fqn: str
    shape: tuple[int, ...]
    mesh: int | None
    placements: tuple[str, ...]
    optimizer: str
    group: int


@dataclass(frozen=True)
class World:
    """A recipe's parameters on many ranks.

    Attributes:
        size: number of ranks.
        rank: the slowest rank of the modelled step.
        meshes: shape and names of the dimensions; ranks in order.
        groups: by optimizer, the options of each parameter group.
        splits: fields of `titan_muon.options.Split`.
    """

    size: int
    rank: int
    meshes: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    splits: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...]

    def device_meshes(self, device: str) -> list[DeviceMesh]:
        """The meshes, in a process group of `size` ranks."""
        ranks = torch.arange(self.size)
        return [DeviceMesh(device, ranks.view(shape), mesh_dim_names=names) for shape, names in self.meshes]


def placement_of(text: str) -> Placement:
    """A placement from its representation."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if text.startswith("_StridedShard"):
        return _StridedShard(numbers[0], split_factor=numbers[1])
    return Shard(numbers[0]) if text.startswith("S") else Replicate()


def read(name: str) -> World:
    """A world of the file."""
    entry = json.loads(FILE.read_text(encoding="utf-8"))[name]
    rows = tuple(
        Row(row[0].replace("{}", str(layer)), tuple(row[1]), row[2], tuple(row[3]), row[4], row[5])
        for block in entry["blocks"]
        for layer in range(*block["layers"])
        for row in block["rows"]
    )
    meshes = tuple((tuple(shape), tuple(names)) for shape, names in entry["meshes"])
    return World(entry["size"], entry["rank"], meshes, entry["groups"], tuple(entry["splits"]), rows)


def blocks(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Runs of layers with equal parameters; other parameters are a layer of their own."""
    pending: dict[str, Any] = {}
    for layer, members in groupby(rows, key=lambda row: LAYER.findall(row.fqn)[:1]):
        number = int(layer[0]) if layer else 0
        plain = [list(asdict(row).values()) for row in members]
        body = [[LAYER.sub("{}", row[0], count=1), *row[1:]] if layer else row for row in plain]
        if pending and layer and body == pending["rows"] and pending["layers"][1] == number:
            pending["layers"][1] += 1
            continue
        if pending:
            yield pending
        pending = {"layers": [number, number + 1], "rows": body}
    yield pending


def described(source: Source) -> World:
    """The world of a recipe, by TorchTitan's model. Once in a process, because of process groups."""
    from titan_muon.trainer.torchtitan import compat

    # Before the import of TorchTitan, which copies the device.
    compat.install()
    import models  # noqa: F401 (registers the families)
    from titan_muon.options import Expert
    from titan_muon.planner.machine import planning_machine
    from titan_muon.planner.timeline import timeline
    from titan_muon.trainer.dry_run.meta_model import build_meta_model
    from titan_muon.trainer.recipe import load

    recipe = load(ROOT / f"configs/{source.recipe}_muon.toml", [*source.overrides, "--qk_clip.mode", "off"])
    meta = build_meta_model(recipe, source.world, "cuda")
    assert meta.plan is not None, "the recipe trains matrices with Muon"
    by_name = meta.optimizers.groups
    place = {n: (name, i) for name, groups in by_name.items() for i, g in enumerate(groups) for n in g.names}
    meshes: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    rows = []
    for fqn, parameter in meta.parameters.items():
        mesh: int | None = None
        placements: tuple[str, ...] = ()
        if isinstance(parameter, DTensor):
            grid = parameter.device_mesh
            assert grid.mesh.flatten().tolist() == list(range(source.world)), "the ranks of a mesh are in order"
            found = (tuple(grid.mesh.shape), tuple(grid.mesh_dim_names or ()))
            mesh = meshes.index(found) if found in meshes else len(meshes)
            meshes += [found] if mesh == len(meshes) else []
            placements = tuple(repr(item) for item in parameter.placements)
        rows.append(Row(fqn, tuple(parameter.shape), mesh, placements, *place[fqn]))
    # An option of the whole Muon that its groups have too.
    more = {"muon": {"eps": Expert().eps}}
    groups = {name: [{**group.options, **more.get(name, {})} for group in given] for name, given in by_name.items()}
    slowest = timeline(meta.plan, planning_machine(recipe.machine, "cuda")).last.rank
    splits = tuple({"match": s.match, "dims": s.dims, "lengths": dict(s.lengths)} for s in recipe.muon.split)
    return World(source.world, slowest, tuple(meshes), groups, splits, tuple(rows))


def as_json(world: World) -> dict[str, Any]:
    """The entry of the file."""
    entry = asdict(world)
    del entry["rows"]
    return {**entry, "blocks": list(blocks(world.rows))}


def main() -> None:
    """Write the file."""
    document = {name: as_json(described(source)) for name, source in SOURCES.items()}
    # A parameter is a line.
    FILE.write_text(json.dumps(document).replace(', ["', ',\n["') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
