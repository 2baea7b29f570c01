"""Writes the tables of docs/compatibility.md: options that exclude each other, by a trial of every pair.

    python docs/make_compatibility.py

Options of `titan_muon.Muon` are tried on a model of one layer in a fake world, a recipe's keys on the relations of
`titan_muon/trainer/recipe/constraints.py`. `tests/unit/docs/test_docs.py` fails where the page differs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Placement, Shard, distribute_tensor  # noqa: E402

from tests.machines import machine_file  # noqa: E402
from titan_muon import Muon, Owners, apply_in_forward, own  # noqa: E402
from titan_muon.forecast.fake_world import fake_world  # noqa: E402
from titan_muon.options import EXPERT, Expert, MuonOptions, Split, choices  # noqa: E402
from titan_muon.planner.ownership import PlacementRule  # noqa: E402
from titan_muon.trainer.recipe import schema  # noqa: E402
from titan_muon.trainer.recipe.constraints import named_keys, violations  # noqa: E402
from titan_muon.trainer.recipe.sections import Recipe  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- {}: written by docs/make_compatibility.py -->\n", "<!-- end of {} -->\n"

# Products take a second for each FLOP and links are fast, so that ranks share the matrices of the tiny model.
SLOW = machine_file(tflops=1e-12, tflops_float32=1e-12, node_gb=1e6, node_latency_us=0.0, launch_us=0.0)
KERNELS = ("triton",)
"""Values of `ns_kernel` that need a GPU: not tried."""
SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "momentum": (0.9,),
    "momentum_start": (0.5,),
    "momentum_warmup_steps": (10,),
    "weight_decay": (0.0,),
    "adjust_lr_fn": ("original", "spectral_unclamped", 0.18),
    "algorithm": ("muoneq", "muoneq_columns", "muoneq_both", "normuon", "adamuon", "muonh", "soap"),
    "beta2": (0.9,),
    "soap_freq": (5,),
    "replicas": ("redundant",),
    "ns_coefficients": ("polar_express",),
    "split": (
        (Split(match="*.up.weight", dims="(g f) d -> g | f d", lengths={"g": 2}),),
        (Split(match="*.up.weight", dims="f (d g) -> g | f d", lengths={"g": 2}),),
    ),
    "buffer_gib": (2**-6,),
    "fused": (True,),
    "cuda_graph": (True,),
}
"""Sample values of options without choices."""
NAMES = {
    SAMPLES["split"][0]: "split (matrices with rows of their own)",
    SAMPLES["split"][1]: "split (matrices that share rows)",
}
Setting = tuple[str, Any]
"""An option and a value besides the default."""


def settings() -> Iterator[Setting]:
    """Every option of Muon with each of its other choices, or with sample values."""
    accepted, default = dict(choices(MuonOptions)), MuonOptions()
    for item in fields(MuonOptions):
        value = getattr(default, item.name)
        if item.name in SAMPLES:
            yield from ((item.name, sample) for sample in SAMPLES[item.name])
        elif item.name in accepted:
            others = (choice for choice in accepted[item.name] if choice not in (value, *KERNELS))
            yield from ((item.name, choice) for choice in others)
        elif isinstance(value, bool):
            yield item.name, not value
        elif isinstance(value, int | float):
            yield item.name, 2 * value
        else:
            # Options of algorithms that other packages register.
            assert item.name in ("machine", "algorithm_options"), f"{item.name} has no sample"


def written_as(setting: Setting) -> str:
    """A setting as Markdown code."""
    name, value = setting
    if name == "split":
        return f"`{NAMES[value]}`"
    return f"`{name}={value!r}`".replace("'", '"')


class Weight(nn.Module):
    """A module with one parameter of zeros."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


class Block(nn.Module):
    """A layer: a matrix, and another matrix or a stack of experts."""

    def __init__(self, *other: int) -> None:
        super().__init__()
        self.up, self.other = Weight(32, 128), Weight(*other)


class Model(nn.Module):
    """A model of one layer."""

    def __init__(self, *other: int) -> None:
        super().__init__()
        self.layer = Block(*other)


@dataclass(frozen=True)
class Layout:
    """A way to place the model over 8 ranks.

    Attributes:
        axes: sizes of the mesh's axes by name, from TorchTitan's names; empty for plain tensors.
        owned: whether the two matrices of the layer are whole on one rank each.
    """

    axes: Mapping[str, int]
    owned: bool = False

    def model(self) -> nn.Module:
        """The model on rank 0."""
        model = Model(4, 16, 16) if "ep" in self.axes else Model(16, 16)
        if not self.axes:
            return model
        mesh = init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
        layer = model.layer
        if "tp" in self.axes:
            _place(layer.up, mesh["tp"], Shard(1))
            _place(layer.other, mesh["tp"], Shard(0))
        sharding = mesh[tuple(name for name in self.axes if name.startswith("dp"))]
        if "ep" in self.axes:
            _place(layer.other, mesh["ep"], Shard(0))
            fully_shard(layer.other, mesh=mesh["efsdp"])
            sharding = mesh._flatten("dp_shard")
        owned = set[nn.Parameter]()
        if self.owned:
            matrices = [layer.other.weight, layer.up.weight]
            owners = Owners(model, mesh=sharding, params=matrices)
            owned = own(layer, owners=owners)
        fully_shard(layer, mesh=sharding, ignored_params=owned)
        fully_shard(model, mesh=sharding)
        return model


def _place(module: Weight, mesh: DeviceMesh, placement: Placement) -> None:
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [placement]))


ALONE = "one process"
LAYOUTS: Mapping[str, Layout] = {
    ALONE: Layout({}),
    "DDP": Layout({}),
    "FSDP": Layout({"dp_shard": 8}),
    "HSDP": Layout({"dp_replicate": 2, "dp_shard": 4}),
    "EP": Layout({"efsdp": 4, "ep": 2}),
    "TP": Layout({"dp_shard": 4, "tp": 2}),
    "HSDP + TP": Layout({"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    "owned": Layout({"dp_shard": 8}, owned=True),
    "owned + TP": Layout({"dp_shard": 4, "tp": 2}, owned=True),
}
PAIRS = "HSDP + TP"
"""The layout for pairs of options, because every option has something to act on."""


def refusal(model: nn.Module, choices: Sequence[Setting]) -> str:
    """The error of Muon for a model and options; empty if Muon accepts the options."""
    options: dict[str, Any] = {"machine": SLOW, **dict(choices)}
    if options.get("cuda_graph"):
        # As on a GPU.
        options.setdefault("fused", True)
    expert = Expert(**{name: options.pop(name) for name in EXPERT if name in options})
    try:
        # As if Triton and CUDA graphs ran here.
        usable = (patch(f"titan_muon.kernels.{name}", return_value=True) for name in ("fused.usable", "graph.captures"))
        with next(usable), next(usable):
            muon = Muon(model.named_parameters(), **options, expert=expert).build()
        if options.get("overlap") == "forward":
            apply_in_forward(model, muon)
    except ValueError as error:
        return str(error)
    return ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *rows))


def merged(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Rows of (subject, others) from pairs: subjects with equal others share a row."""
    others: dict[str, list[str]] = {}
    for subject, other in pairs:
        others.setdefault(subject, []).append(other)
    subjects: dict[str, list[str]] = {}
    for subject, refused in others.items():
        subjects.setdefault(", ".join(dict.fromkeys(refused)), []).append(subject)
    return ((", ".join(names), refused) for refused, names in sorted(subjects.items(), key=lambda row: row[1][0]))


def library_pairs() -> str:
    """The pairs of options refused by Muon."""
    with warnings.catch_warnings(action="ignore"), fake_world(8):
        rows = list(merged(_refused_pairs(LAYOUTS[PAIRS].model())))
    return table(("option", "refused with"), rows)


def _refused_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    every = list(settings())
    needed: dict[Setting, Setting] = {}
    for setting in every:
        if refusal(model, [setting]):
            needed[setting] = next(o for o in every if o[0] != setting[0] and not refusal(model, [setting, o]))
            yield written_as(setting), f"all but {written_as(needed[setting])}"
    for first, second in combinations(every, 2):
        needs = [needed[setting] for setting in (first, second) if setting in needed]
        names = {first[0], second[0], *(name for name, _ in needs)}
        # Skip two values of an option, and a value of an option needed by the other setting.
        if len(names) < 2 + len(needs):
            continue
        message = refusal(model, [*needs, first, second])
        # If needed settings are refused with each other or with the partner, that pair has a row already.
        pairs = [*combinations(needs, 2), *((need, s) for need in needs for s in (first, second) if s not in needed)]
        if not message or any(refusal(model, pair) for pair in pairs):
            continue
        # The message begins with the option to change.
        subject, other = (first, second) if message.startswith(f"{first[0]} ") else (second, first)
        yield written_as(subject), written_as(other)


def library_layouts() -> str:
    """The options of Muon refused by some layouts and accepted by others."""
    refusals: dict[Setting, dict[str, str]] = {}
    for name, layout in LAYOUTS.items():
        with warnings.catch_warnings(action="ignore"), fake_world(1 if name == ALONE else 8):
            model = layout.model()
            for setting in settings():
                refusals.setdefault(setting, {})[name] = refusal(model, [setting])
    refused = (
        (written_as(setting), layout)
        for setting, messages in refusals.items()
        if not all(messages.values())
        for layout, message in messages.items()
        if message
    )
    return table(("option", "refused under"), merged(refused))


RECIPE_SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "data.files": (("*.txt",),),
    "data.weights": ((3.0, 1.0),),
    "data.text_key": ("body",),
    "data.token_marks": ((0,),),
    "data.tokenizer_path": ("tokenizer",),
    "data.validation_fraction": (0.0,),
    "training.local_batch_size": (-1,),
    "training.global_batch_size": (64,),
    "lr_scheduler.warmup_steps": (600,),
    "lr_scheduler.total_steps": (100, 2000),
    "lr_scheduler.decay_ratio": (0.5, 1.0),
    "loss.chunks": (3,),
    "validator.steps": (-1,),
    "compile.components": (("loss",),),
    "profiler.profile_freq": (2,),
    "placement.muon": ("owned", "another"),
    "placement.rule": (
        (PlacementRule(match="*.wq.weight", placement="owned"),),
        (PlacementRule(match="*.wq.weight", placement="shard0", owner=1),),
    ),
    "checkpoint.initial_load_path": ("/weights",),
    "model.hf_assets_path": ("weights",),
}
"""Sample values of keys without choices, for the relations about them."""


def recipe_settings() -> Iterator[Setting]:
    """Every key of a recipe with each of its other choices, or with sample values."""
    default, ranges = schema.values(Recipe()), schema.keys(Recipe, ranges=True)
    for key, kind in schema.keys(Recipe).items():
        for value in RECIPE_SAMPLES.get(key) or _others(kind, default[key]):
            if value != default[key] and _in_range(ranges[key], value):
                yield key, value


def _in_range(kind: Any, value: Any) -> bool:
    ranges = (part for part in (kind, *get_args(kind)) if get_origin(part) is Annotated)
    return all(part.__metadata__[0].holds(value) for part in ranges)


def _others(kind: Any, value: Any) -> tuple[Any, ...]:
    choices = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    if choices:
        return get_args(choices[0])
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (2 * value or 1,)
    return (2,) if int in get_args(kind) else ()


def with_keys(choices: Iterable[Setting]) -> Recipe:
    """The default recipe with some keys changed."""
    recipe = Recipe()
    for key, value in choices:
        recipe = _changed(recipe, key, value)
    return recipe


def _changed(table: Any, key: str, value: Any) -> Any:
    name, _, inner = key.partition(".")
    return replace(table, **{name: _changed(getattr(table, name), inner, value) if inner else value})


def recipe_pairs() -> str:
    """Each check of related keys: the key and the accepted values."""
    every = list(recipe_settings())
    broken = {setting: broken_by([setting]) for setting in every}
    found = set[tuple[str, str]]().union(*broken.values())
    for first, second in combinations(every, 2):
        if first[0] != second[0]:
            found |= broken_by((first, second))
    order = list(schema.keys(Recipe))
    keys: dict[str, list[str]] = {}
    for key, accepted in sorted(found, key=lambda violation: (order.index(violation[0]), violation[1])):
        keys.setdefault(accepted, []).append(f"`{key}`")
    return table(("key", "accepted"), ((", ".join(names), accepted) for accepted, names in keys.items()))


def broken_by(choices: Sequence[Setting]) -> set[tuple[str, str]]:
    """The violations of the default recipe with some keys changed."""
    return {(key, named_keys(accepted)[0]) for key, accepted in violations(with_keys(choices))}


TABLES: Mapping[str, Callable[[], str]] = {
    "layouts": library_layouts,
    "options": library_pairs,
    "recipe keys": recipe_pairs,
}


def written(page: str) -> str:
    """The page with new tables. Raises ValueError if the page has no place for a table."""
    for name, make in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, opened, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{PAGE}: needs the lines {begin!r} and {end!r}, between which the table is written")
        page = before + begin + make() + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
