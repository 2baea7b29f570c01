"""The rows: which training equals which reference."""

from typing import Any

import torch

from tests.parity.layouts import BLOCKS, FUSED, MATRICES, STACKS
from tests.parity.references import ALGORITHM
from tests.parity.training import DROP, Row
from titan_muon.options import Machine

ALL = (*MATRICES, *STACKS)
EVEN = ("wide", "tall")
FEW = ("wide", "tall", "short", "experts")
SLOW = Machine(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0, launch_us=0.0)
"""Slow links, for plans with several buckets in flight."""
SLOW_NETWORK = Machine(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
"""Slow traffic between replicas, for hierarchical returns."""
SLOW_COMPUTE = Machine(tflops=1e-6, tflops_float32=1e-6, node_gb=1e3, node_latency_us=0.0, launch_us=0.0)
"""Slow compute, for matrices that several ranks share."""
FLOAT32: dict[str, Any] = {"ns_dtype": "float32", "wire_dtype": "float32", "orthogonalize": "auto"}
ONE, TWO = ("plain",), ("plain", "replicated", "fsdp", "tp columns", "owned")
FOUR = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "fsdp x tp copies", "ep x rows", "plain", "replicated")
EIGHT = ("fsdp", "hsdp", "hsdp x tp", "hsdp x ep", "owned, hsdp")
MIXED = ("fsdp", "hsdp", "fsdp x tp rows", "ep x rows", "plain")
SHARDED = tuple(name for name in MIXED if name != "plain")
LINES = ("fsdp", "hsdp", "fsdp x tp rows", "plain")
"""Layouts that do not cut rows."""
MODULES = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns")


def rows() -> list[Row]:
    """All rows, those about the most code first."""
    return [*options(), *overlaps(), *faults(), *layouts(), *algorithms(), *actions()]


def layouts() -> list[Row]:
    """Each layout alone."""
    worlds = {
        1: ONE,
        2: TWO,
        4: (*FOUR, "tp rows", "tp x ep", "owned", "owned, hsdp"),
        8: EIGHT,
    }
    return [
        Row(f"{layout}, {world} ranks", world, (layout,), ALL) for world, names in worlds.items() for layout in names
    ]


def options() -> list[Row]:
    """Options that move work, memory or traffic, and change no bit."""
    several = {"buffer_bytes": 6_000}
    made = [
        Row("all layouts", 4, (*FOUR, "owned"), ALL),
        Row("splits", 4, ("fsdp", "hsdp", "fsdp x tp rows", "tp columns", "fsdp x tp columns"), tuple(FUSED)),
        Row("splits along the last dim", 2, ("last dim",), ("w13", "efd", "columns")),
        Row("several meshes", 4, ("fsdp", "first ranks", "last ranks", "all but one", "every other", "one rank"), FEW),
        Row("two groups", 4, MIXED, ALL, groups=True),
        Row("hierarchical", 4, ("hsdp",), ALL, {"machine": SLOW_NETWORK}, proof="hierarchical"),
        Row("hierarchical, replicated", 4, ("replicated",), ALL, {"machine": SLOW_NETWORK}, proof="hierarchical"),
        Row("hierarchical, plain", 4, ("plain",), ALL, {"machine": SLOW_NETWORK}, proof="hierarchical"),
        Row("hierarchical, 8 ranks", 8, ("hsdp", "hsdp x tp"), ALL, {"machine": SLOW_NETWORK}, proof="hierarchical"),
    ]
    changed: dict[str, dict[str, Any]] = {
        "all_gather": {"exchange": "all_gather"},
        "owners everyone": {"exchange": "all_gather", "owners": "everyone"},
        "all_gather_reduce_scatter": {"exchange": "all_gather_reduce_scatter"},
        "redundant": {"replicas": "redundant"},
        "state owner": {"state": "owner"},
        "float32 wire": {"wire_dtype": "float32"},
        "kept buffers": {"keep_buffers": True},
        "released gradients": {"release_grads": True},
        "offloaded state": {"offload": "state"},
        "offloaded parameters": {"offload": "parameters"},
        "skip": {"missing_grad": "skip", "nonfinite": "skip"},
    }
    made += [Row(name, 4, MIXED, ALL, options) for name, options in changed.items()]
    bucketed = {
        "several buckets": several,
        "several buckets, released and kept": {**several, "release_grads": True, "keep_buffers": True},
        "several buckets, state owner": {**several, "state": "owner"},
        "several buckets, offloaded state": {**several, "offload": "state"},
        "several buckets, all_gather": {"buffer_bytes": 12_000, "exchange": "all_gather"},
        "several buckets, all_gather_reduce_scatter": {"buffer_bytes": 24_000, "exchange": "all_gather_reduce_scatter"},
        "several buckets, hierarchical": {"buffer_bytes": 8_000, "machine": SLOW_NETWORK, "state": "owner"},
    }
    made += [Row(name, 4, MIXED, ALL, options, proof="several buckets") for name, options in bucketed.items()]
    for exchange in ("all_gather", "all_gather_reduce_scatter"):
        made += [
            Row(f"{exchange}, {world} ranks", world, names, ALL, {"exchange": exchange})
            for world, names in ((2, TWO[:-1]), (8, EIGHT[:-1]))
        ]
        made.append(
            Row(f"splits, {exchange}", 4, ("fsdp x tp rows", "tp columns"), tuple(FUSED), {"exchange": exchange})
        )
    sliced = {"split_over": 4, "machine": SLOW_COMPUTE, **FLOAT32}
    shared = {"tensor_parallel": "distributed", **FLOAT32}
    close: dict[str, Any] = {"reference": "paper", "close": 1e-4, "ns_dtype": torch.float32}
    made += [
        Row("slices", 4, ("fsdp", "hsdp", "fsdp x tp rows"), tuple(BLOCKS), sliced, proof="slices", **close),
        Row("slices, columns", 2, ("tp columns",), tuple(BLOCKS), sliced, proof="slices", **close),
        Row("distributed", 4, ("tp rows", "tp columns"), EVEN, shared, **close),
        Row("distributed, 2 of 4", 4, ("fsdp x tp columns", "fsdp x tp rows"), EVEN, shared, **close),
        *(
            Row(f"{kernel} in float32", 2, TWO, ALL, {"orthogonalize": kernel, **FLOAT32}, **close)
            for kernel in ("auto", "standard", "gram")
        ),
    ]
    return made


def overlaps() -> list[Row]:
    """Communication behind compute, in layouts of modules and in others."""
    backward = {"overlap": "backward", "machine": SLOW, "buffer_bytes": 60_000}
    forward = {"overlap": "forward", "machine": SLOW, "buffer_bytes": 60_000}
    wide = {"math": {"adjust_lr_fn": "original"}}
    return [
        Row("modules", 4, MODULES, ALL, sharded=True),
        Row("modules, 2 ranks", 2, ("fsdp", "owned"), ALL, sharded=True),
        Row("modules owned", 4, ("owned", "owned, hsdp"), ALL, sharded=True),
        Row("modules under DDP", 2, ONE, ALL, sharded=True),
        Row("tensor parallelism alone", 2, ("tp rows", "tp columns"), ALL, sharded=True),
        Row("backward", 4, MODULES, ALL, backward, sharded=True, proof="several buckets"),
        Row(
            "backward, 2 ranks",
            2,
            ("fsdp", "fsdp"),
            ALL,
            {**backward, "buffer_bytes": 8_000},
            sharded=True,
            proof="several buckets",
        ),
        Row("backward beside owned", 2, ("fsdp", "owned"), ALL, backward, sharded=True),
        Row("backward without modules", 4, SHARDED, ALL, backward, proof="several buckets"),
        Row("backward, reduced", 4, SHARDED, ALL, {**backward, "exchange": "all_gather_reduce_scatter"}),
        Row("backward, released", 4, MODULES, ALL, {**backward, "release_grads": True}, sharded=True),
        Row("forward", 4, MODULES, ALL, forward, sharded=True, proof="several buckets"),
        Row(
            "forward, 2 ranks",
            2,
            ("fsdp", "fsdp"),
            ALL,
            {**forward, "buffer_bytes": 8_000},
            sharded=True,
            proof="several buckets",
        ),
        Row("forward, gathered", 4, MODULES, ALL, {**forward, "exchange": "all_gather"}, sharded=True),
        Row("forward, reduced", 4, MODULES, ALL, {**forward, "exchange": "all_gather_reduce_scatter"}, sharded=True),
        Row("forward, state owner", 4, MODULES, ALL, {**forward, "state": "owner"}, sharded=True),
        Row(
            "forward, hierarchical",
            4,
            ("hsdp",),
            ALL,
            {**forward, "machine": SLOW_NETWORK},
            sharded=True,
            proof="hierarchical",
        ),
        Row("forward, original", 4, MODULES, ALL, forward, sharded=True, **wide),
    ]


def faults() -> list[Row]:
    """Missing and non-finite gradients: skipped, or an error with the name on every rank."""
    nan, drop = {1: ("tall", torch.nan)}, {1: ("tall", DROP)}
    late_nan, late_drop = {2: ("uneven", torch.nan)}, {2: ("uneven", DROP)}
    skip = {"missing_grad": "skip", "nonfinite": "skip"}
    raises = ("layers.0.uneven",)
    made = []
    for end, options in ENDS.items():
        sharded = end == "forward"
        names = {"forward": MODULES, "backward": SHARDED}.get(end, MIXED)
        made += [
            Row(f"nan skipped{end and ', '}{end}", 4, names, ALL, {**skip, **options}, gradients=nan, sharded=sharded),
            Row(
                f"missing skipped{end and ', '}{end}",
                4,
                names,
                ALL,
                {**skip, **options},
                gradients=drop,
                sharded=sharded,
            ),
            Row(
                f"nan raises{end and ', '}{end}",
                4,
                names,
                ALL,
                options,
                gradients=late_nan,
                error=raises,
                sharded=sharded,
            ),
            Row(
                f"missing raises{end and ', '}{end}",
                4,
                names,
                ALL,
                options,
                gradients=late_drop,
                error=raises,
                sharded=sharded,
            ),
        ]
    expert = {1: ("experts", torch.nan)}
    made.append(Row("nan of an expert skipped", 4, MIXED, ALL, skip, gradients=expert))
    made.append(Row("nan of an expert skipped, owned", 2, ("owned", "fsdp"), ALL, skip, gradients=expert))
    return made


ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "several buckets": {"buffer_bytes": 6_000},
    "backward": {"overlap": "backward", "machine": SLOW, "buffer_bytes": 60_000},
    "forward": {"overlap": "forward", "machine": SLOW, "buffer_bytes": 60_000},
}


def algorithms() -> list[Row]:
    """Arithmetic: hyperparameters, algorithms, decay, dtypes of state and weights."""
    adaptive = {ALGORITHM: "normuon", "beta2": 0.9}
    elements = {ALGORITHM: "adamuon", "beta2": 0.9}
    sphere = {ALGORITHM: "muonh", "weight_decay": 0.0}
    zeros = {1: ("tall", 0.0), 2: ("experts", 0.0)}
    torchs: dict[str, dict[str, Any]] = {
        "without nesterov": {"nesterov": False},
        "original": {"adjust_lr_fn": "original"},
        "three iterations": {"ns_steps": 3},
        "without decay": {"weight_decay": 0.0},
        "decay and momentum": {"weight_decay": 0.5, "momentum": 0.6},
    }
    papers: dict[str, dict[str, Any]] = {
        "normuon": adaptive,
        "adamuon": elements,
        "adamuon without nesterov": {**elements, "nesterov": False},
        "cautious": {"cautious": True, "weight_decay": 0.5},
        "cautious normuon": {**adaptive, "cautious": True, "weight_decay": 0.5},
        "decay follows lr": {"decay_follows_lr": True, "weight_decay": 0.5},
        "warm-up": {"momentum_warmup_steps": 2},
        "number": {"adjust_lr_fn": 0.18},
        "spectral": {"adjust_lr_fn": "spectral_unclamped"},
    }
    made = [Row(name, 4, MIXED, ALL, math=math) for name, math in torchs.items()]
    made += [Row(name, 4, (*MIXED, "owned"), ALL, math=math, reference="paper") for name, math in papers.items()]
    made += [
        Row("normuon, 8 ranks", 8, EIGHT, ALL, math=adaptive, reference="paper"),
        Row("normuon, 2 ranks", 2, TWO, ALL, math=adaptive, reference="paper"),
        Row("normuon, state owner", 4, MIXED, ALL, {"state": "owner"}, adaptive, "paper"),
        Row("normuon, redundant", 4, MIXED, ALL, {"replicas": "redundant"}, adaptive, "paper"),
        Row("normuon, all_gather", 4, MIXED, ALL, {"exchange": "all_gather"}, adaptive, "paper"),
        Row("normuon, offloaded", 4, MIXED, ALL, {"offload": "state"}, adaptive, "paper"),
        Row("normuon, forward", 4, MODULES, ALL, ENDS["forward"], adaptive, "paper", sharded=True),
        Row("normuon, backward", 4, MODULES, ALL, ENDS["backward"], adaptive, "paper", sharded=True),
        Row(
            "normuon of a nan",
            4,
            MIXED,
            ALL,
            {"nonfinite": "skip"},
            adaptive,
            "paper",
            gradients={1: ("experts", torch.nan)},
        ),
        Row("cautious, forward", 4, MODULES, ALL, ENDS["forward"], papers["cautious"], "paper", sharded=True),
        Row("warm-up, several buckets", 4, MIXED, ALL, ENDS["several buckets"], papers["warm-up"], "paper"),
        Row("muonh", 4, (*MIXED, "owned"), ALL, math=sphere, reference="paper", close=1e-4),
        Row("muonh, 2 ranks", 2, TWO, ALL, math=sphere, reference="paper", close=1e-4),
        Row("hold", 4, (*MIXED, "owned"), ALL, math={"idle": "hold"}, reference="paper", gradients=zeros),
        Row("normuon held", 4, MIXED, ALL, math={**adaptive, "idle": "hold"}, reference="paper", gradients=zeros),
        Row("zero gradients move", 4, MIXED, ALL, gradients=zeros),
    ]
    rounded: dict[str, Any] = {"dtype": torch.bfloat16, "reference": "one process"}
    rows_alone = ("plain", "replicated", "fsdp")
    made += [
        Row("bfloat16 weights", 4, rows_alone, FEW, **rounded),
        Row("bfloat16 weights to nearest", 4, MIXED, FEW, math={"rounding": "nearest"}, close=0.05, **rounded),
        Row("bfloat16 weights, redundant", 2, rows_alone, FEW, {"replicas": "redundant"}, **rounded),
        Row("bfloat16 momentum", 4, MIXED, ALL, math={"state_dtype": "bfloat16"}, reference="one process"),
        Row("bfloat16 momentum and weights", 4, rows_alone, FEW, math={"state_dtype": "bfloat16"}, **rounded),
        Row("int8 momentum", 4, (*LINES, "owned"), FEW, {"state_dtype": "int8"}, reference="one process", close=0.2),
        Row("int8 momentum, several buckets", 4, LINES, FEW, ENDS["several buckets"], {"state_dtype": "int8"}, "twin"),
        Row(
            "int8 momentum, forward",
            4,
            MODULES[:3],
            FEW,
            ENDS["forward"],
            {"state_dtype": "int8"},
            "twin",
            sharded=True,
        ),
    ]
    twins: dict[str, dict[str, Any]] = {
        "backward": ENDS["backward"],
        "forward": ENDS["forward"],
    }
    made += [
        Row(f"bfloat16 weights, {name}", 4, MODULES, FEW, options, sharded=True, dtype=torch.bfloat16, reference="twin")
        for name, options in twins.items()
    ]
    made.append(
        Row(
            "bfloat16 weights, several buckets",
            4,
            MIXED,
            FEW,
            {"buffer_bytes": 6_000, "state": "owner"},
            dtype=torch.bfloat16,
            reference="twin",
        )
    )
    return made


def actions() -> list[Row]:
    """Drivers of steps, and actions between steps."""
    adaptive = {ALGORITHM: "normuon", "beta2": 0.9}
    everything = (
        "swap_data",
        "swap_and_rebuild",
        "reload",
        "new_optimizer",
        "move_to_host_and_back",
        "move_to_host",
        "check",
    )
    made = [Row(name.replace("_", " "), 4, (*MIXED, "owned"), ALL, between={0: name}) for name in everything]
    made += [
        Row(f"{name.replace('_', ' ')}, normuon", 4, MIXED, ALL, math=adaptive, reference="paper", between={0: name})
        for name in ("swap_and_rebuild", "reload", "new_optimizer")
    ]
    made += [
        Row("replace parameters", 4, MIXED, ALL, between={0: "replace_parameters"}),
        Row("freeze and thaw", 4, MIXED, ALL, between={0: "freeze", 1: "thaw"}),
        Row(
            "freeze and thaw, normuon",
            4,
            MIXED,
            ALL,
            math=adaptive,
            reference="paper",
            between={0: "freeze", 1: "thaw"},
        ),
        Row("reload, state owner", 4, MIXED, ALL, {"state": "owner"}, between={0: "reload", 1: "swap_data"}),
        Row("reload, forward", 4, MODULES, ALL, ENDS["forward"], sharded=True, between={0: "reload", 1: "check"}),
        Row("swap data, backward", 4, SHARDED, ALL, ENDS["backward"], between={0: "swap_data", 1: "swap_and_rebuild"}),
        Row(
            "reload, int8",
            4,
            ("fsdp", "hsdp", "plain"),
            FEW,
            math={"state_dtype": "int8"},
            reference="twin",
            between={0: "reload", 1: "new_optimizer"},
        ),
        Row("closure", 4, MIXED, ALL, closure=True),
        Row("closure, forward", 4, MODULES, ALL, ENDS["forward"], sharded=True, closure=True),
        *(
            Row(f"scaler, {layout}", 4, (layout,), ALL, scaler=True)
            for layout in ("fsdp", "hsdp", "fsdp x tp rows", "plain")
        ),
        Row("scaler, offloaded state", 2, ("fsdp",), ALL, {"offload": "state"}, scaler=True),
        Row("scaler, offloaded parameters", 2, ("fsdp",), ALL, {"offload": "parameters"}, scaler=True),
        Row(
            "scaler, bfloat16 momentum",
            4,
            ("hsdp",),
            FEW,
            math={"state_dtype": "bfloat16"},
            reference="one process",
            scaler=True,
        ),
        Row("scaler, normuon", 4, ("hsdp",), ALL, math=adaptive, reference="paper", scaler=True),
    ]
    return made
