"""The rows: which training equals which reference."""

from dataclasses import replace
from typing import Any

import torch

from tests.machines import machine_file
from tests.parity.layouts import DEVICE, FUSED, MATRICES, ODD, STACKS
from tests.parity.references import ALGORITHM, OTHER_GROUP
from tests.parity.training import DROP, ELSEWHERE, Row
from titan_muon.options import Machine

SLOW = machine_file(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0, launch_us=0.0)
"""Slow links, for plans with several buckets in flight."""
SLOW_NETWORK = machine_file(ranks_per_node=1, network_gb=1e-6, network_latency_us=0.0, node_latency_us=0.0)
"""Slow traffic between replicas, for hierarchical returns."""
ALL, FEW, EVEN = (*MATRICES, *STACKS), ("wide", "tall", "short", "experts"), ("wide", "tall")
CLOSE_ON_GPU = 0.1
"""A misplaced piece is an error of 1."""
TWO = ("plain", "replicated", "fsdp", "tp columns")
FOUR = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "fsdp x tp copies", "ep x rows", "plain", "replicated")
EIGHT = ("fsdp", "hsdp", "hsdp x tp", "hsdp x ep")
MODULES = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns")
SHARDED = ("fsdp", "hsdp", "fsdp x tp rows", "ep x rows")
MIXED, HALF = (*SHARDED, "plain"), ("fsdp beside tp", "plain")
LINES = ("fsdp", "hsdp", "fsdp x tp rows", "plain")
OWNED_LINES = (*LINES, "owned")
"""Layouts that do not cut rows."""

Options = dict[str, Any]


def in_bytes(number: int) -> Options:
    """Buffers of that many bytes."""
    return {"buffer_gib": number / 2**30}


SEVERAL: Options = in_bytes(6_000)
FORWARD: Options = {"overlap": "forward", "machine": SLOW, "buffer_gib": 60_000 / 2**30}
KEPT: Options = {"state": "owner"}
RULE: Options = {"planner": "rule"}
"""Two rounds for small models, and hierarchical returns with replicas."""
OWNED_TOO = ("offloaded state", "offloaded parameters", "skip", "float32 wire", "released gradients")
SKIP: Options = {"on_bad_gradient": "skip_step"}
MISSING: Options = {"on_bad_gradient": "skip_missing"}
GATHERED: Options = {"exchange": "all_gather"}
REDUCED: Options = {"exchange": "all_gather_reduce_scatter"}
MOVED: dict[str, Options] = {
    "all_gather": GATHERED,
    "all_gather_reduce_scatter": REDUCED,
    "redundant": {"replicas": "redundant"},
    "state owner": KEPT,
    "offloaded state": {"offload": "state"},
}
"""Options that move work, memory or traffic, on any layout."""
FLOAT32: Options = {"ns_dtype": "float32", "wire_dtype": "float32", "orthogonalize": "auto"}
NOT_FINITE = "gradient or momentum was not finite"

ROWS_SMOOTHED: Options = {ALGORITHM: "normuon", "beta2": 0.9}
ELEMENTS_SMOOTHED: Options = {ALGORITHM: "adamuon", "beta2": 0.9}
SOAP: Options = {"reference": "paper", "shapes": FEW, "math": {ALGORITHM: "soap", "soap_freq": 2}}
SPHERE: Options = {ALGORITHM: "muonh", "weight_decay": 0.0}
NORMUONH: Options = {**SPHERE, ALGORITHM: ("normuon", "muonh"), "beta2": 0.9}
SECOND: dict[str, Options] = {name: {ALGORITHM: name, "lr": 0.01} for name in ("normuon", "soap", "muoneq")}
"""Another algorithm in the second group."""
MUON_AND_NORMUON: Options = {"reference": "paper", "math": {"beta2": 0.9}, "groups": SECOND["normuon"]}
NORMUON_AND_SOAP: Options = {"reference": "paper", "math": {**ROWS_SMOOTHED, "soap_freq": 2}, "groups": SECOND["soap"]}
ON_SPHERE: Options = {"reference": "paper", "math": SPHERE, "close": 1e-4}
MUONH_AND_MUON: Options = {**ON_SPHERE, "groups": {ALGORITHM: "muon", "weight_decay": 0.1}}
ROWS_BEFORE_AND_AFTER: Options = {ALGORITHM: ("muoneq", "normuon"), "beta2": 0.9}
CAUTIOUS: Options = {"cautious": True, "weight_decay": 0.5}

IN_MODULES: Options = {"layouts": MODULES, "sharded": True}
CLOSE: Options = {"reference": "paper", "close": 1e-4, "ns_dtype": torch.float32}
NORMUON: Options = {"reference": "paper", "math": ROWS_SMOOTHED}
BFLOAT16: Options = {"dtype": torch.bfloat16, "shapes": FEW}
ALONE: Options = {"reference": "one process"}


def row(name: str, world: int = 4, layouts: tuple[str, ...] = MIXED, **fields: Any) -> Row:
    """A row, by default on four ranks in several layouts at once."""
    return Row(name, world, layouts, **({"shapes": ALL} | fields))


def rows() -> list[Row]:
    """All rows, those about the most code first."""
    parts = (options, hops, owned, ranges, overlaps, faults, layouts, algorithms, batched, actions)
    return [item for part in parts for item in part()]


def exchanged() -> list[Row]:
    """Rows of four ranks for every layout and exchange. On a GPU they are close, not equal: it rounds by shapes."""
    chosen = [*layouts(), *options()]
    close = {"close": CLOSE_ON_GPU} if DEVICE.type == "cuda" else {}
    return [replace(item, **close) for item in chosen if item.world == 4 and not item.error]


def layouts() -> list[Row]:
    worlds = {
        1: ("plain",),
        2: (*TWO, "owned"),
        4: ("fsdp beside tp", *FOUR, "tp rows", "tp x ep", "owned", "owned, hsdp"),
        8: (*EIGHT, "owned, hsdp"),
    }
    return [row(f"{layout}, {world} ranks", world, (layout,)) for world, names in worlds.items() for layout in names]


def options() -> list[Row]:
    """Options that move work, memory or traffic, and change no bit."""
    meshes = ("fsdp", "first ranks", "last ranks", "all but one", "every other", "one rank")
    network = {"options": {"machine": SLOW_NETWORK}, "proof": "hierarchical"}
    changed: dict[str, Options] = {
        **MOVED,
        "float32 wire": {"wire_dtype": "float32"},
        "kept buffers": {"keep_buffers": True},
        "released gradients": {"release_grads": True},
        "offloaded parameters": {"offload": "parameters"},
        "skip": SKIP,
        "skip missing": MISSING,
    }
    bucketed: dict[str, Options] = {
        "several buckets": SEVERAL,
        "several buckets, released and kept": {**SEVERAL, "release_grads": True, "keep_buffers": True},
        "several buckets, state owner": {**SEVERAL, **KEPT},
        "several buckets, offloaded state": {**SEVERAL, "offload": "state"},
        "several buckets, all_gather": {**GATHERED, **in_bytes(12_000)},
        "several buckets, all_gather_reduce_scatter": {**REDUCED, **in_bytes(24_000)},
        "several buckets, offloaded, all_gather": {**GATHERED, **in_bytes(12_000), "offload": "state"},
        "several buckets, offloaded, reduced": {**REDUCED, **in_bytes(24_000), "offload": "state"},
        "several buckets, hierarchical": {"buffer_gib": 8_000 / 2**30, "machine": SLOW_NETWORK, "state": "owner"},
    }
    keeping = {name: changed[name] for name in ("released gradients", "offloaded state", "skip", "skip missing")}
    exchanges = {"all_gather": GATHERED, "all_gather_reduce_scatter": REDUCED}
    return [
        row("all layouts", layouts=(*FOUR, "owned")),
        row("splits", layouts=(*MODULES, "tp columns"), shapes=(*FUSED,)),
        row("splits along the last dim", 2, ("last dim",), shapes=("w13", "efd", "columns")),
        row("several meshes", layouts=meshes, shapes=FEW),
        row("several meshes, several buckets", layouts=meshes[:5], shapes=FEW, options=SEVERAL),
        row("odd shapes", layouts=(*FOUR, "owned"), shapes=(*ODD,)),
        row("two groups", groups=OTHER_GROUP),
        row("two halves of the ranks", layouts=HALF, group="shard tp", talks=(2,), between={0: "check", 1: "reload"}),
        row("hierarchical", layouts=("hsdp",), **network),
        row("hierarchical, replicated", layouts=("replicated",), **network),
        row("hierarchical, plain", layouts=("plain",), **network),
        row("hierarchical, 8 ranks", 8, ("hsdp", "hsdp x tp"), **network),
        row("rule", layouts=(*FOUR, "owned"), options=RULE, proof="several buckets"),
        row("rule, hierarchical", layouts=("hsdp",), options=RULE, proof="hierarchical"),
        row("rule, 8 ranks", 8, EIGHT, options=RULE, proof="hierarchical"),
        *(row(f"rule, {name}", options={**options, **RULE}) for name, options in exchanges.items()),
        *(row(name, layouts=(*MIXED, "fsdp beside tp"), options=options) for name, options in changed.items()),
        *(row(f"{name}, owned", 2, ("owned", "fsdp"), options=changed[name]) for name in OWNED_TOO),
        *(row(f"state owner, {name}", options={**KEPT, **options}) for name, options in keeping.items()),
        row("state owner, without nesterov", options=KEPT, math={"nesterov": False}),
        row("state owner, bfloat16 momentum", options=KEPT, math={"state_dtype": "bfloat16"}, reference="one process"),
        *(row(name, options=options, proof="several buckets") for name, options in bucketed.items()),
        *(row(f"{name}, 2 ranks", 2, TWO, options=options) for name, options in exchanges.items()),
        *(row(f"{name}, 8 ranks", 8, EIGHT, options=options) for name, options in exchanges.items()),
        *(
            row(f"splits, {name}", layouts=("fsdp x tp rows", "tp columns"), shapes=(*FUSED,), options=options)
            for name, options in exchanges.items()
        ),
        *(
            row(f"{kernel} in float32", 2, TWO, options={**FLOAT32, "orthogonalize": kernel}, **CLOSE)
            for kernel in ("auto", "standard", "gram")
        ),
    ]


HOPPING = ("fsdp", "fsdp x tp rows", "fsdp x tp columns", "ep x rows", "tp rows", "tp x ep")


def in_hops(ranks_per_node: int, **more: Any) -> Options:
    return {"exchange": "two_hops", "machine": Machine(ranks_per_node=ranks_per_node), **more}


def hops() -> list[Row]:
    """Two hops through nodes of 4, 2 and 3 ranks, of which the last has 2."""
    kept = {"release_grads": True, "keep_buffers": True, "buffer_gib": 12_000 / 2**30}
    forward = {**FORWARD, "exchange": "two_hops", "machine": replace(SLOW, ranks_per_node=2)}
    return [
        row("two hops, 2 nodes", 8, HOPPING, options=in_hops(4, **SKIP), proof="two hops"),
        row("two hops, 4 nodes", 8, HOPPING, options=in_hops(2, **kept), between={0: "reload"}, proof="two hops"),
        row("two hops, odd", 8, HOPPING[:3], shapes=(*ODD,), options=in_hops(3), proof="two hops"),
        row("two hops, hsdp", 8, ("fsdp", "hsdp", "hsdp x tp"), options=in_hops(4), proof="hops beside replicas"),
        row("two hops, forward", layouts=MODULES[::2], options=forward, sharded=True, proof="two hops"),
    ]


def owned() -> list[Row]:
    """Whole matrices on their owners, and the groups that communicate in a step."""
    return [
        row("owned alone", layouts=("owned",), talks=()),
        row("owned beside whole experts", 2, ("owned", "fsdp"), shapes=("experts",), talks=()),
        row("owned, hsdp, redundant", layouts=("owned, hsdp",), options={"replicas": "redundant"}, talks=()),
        row("owned, hsdp, split", layouts=("owned, hsdp",), options={"replicas": "split"}, talks=(2, 4)),
        row("owned x tp", layouts=("owned x tp",), shapes=EVEN, talks=(2,)),
        row("owned x tp, several buckets", layouts=("owned x tp", "fsdp"), shapes=EVEN, options=SEVERAL),
    ]


def ranges() -> list[Row]:
    """Any range of rows on each rank, as Megatron-FSDP shards."""
    four = ("ranges", "ranges, hsdp", "ranges, hfsdp", "ranges x tp rows", "ranges x tp columns", "ranges beside tp")
    changed = {**MOVED, "several buckets, released": {**SEVERAL, "release_grads": True}}
    nan, missing = ({"gradients": {2: ("tall", change)}, "error": ("layers.0.tall",)} for change in (torch.nan, DROP))
    return [
        row("ranges, 2 ranks", 2, ("ranges", "fsdp", "plain")),
        *(row(f"{layout}, 4 ranks", layouts=(layout,)) for layout in four),
        row("ranges, splits", layouts=four[:4], shapes=(*FUSED,)),
        row("ranges, odd shapes", layouts=four, shapes=(*ODD,)),
        row("ranges, 8 ranks", 8, four[:3]),
        *(row(f"ranges, {name}", layouts=four[:5], options=options) for name, options in changed.items()),
        row("ranges, normuon", layouts=four[:5], **NORMUON),
        row("ranges, int8 momentum", layouts=four[:3], shapes=FEW, math={"state_dtype": "int8"}, reference="twin"),
        row("ranges, offloaded and reloaded", layouts=four[:3], between={0: "move_to_host", 1: "reload"}),
        row("ranges, nan raises", layouts=four[:3], **nan),
        row("ranges, missing raises", layouts=four[:3], **missing),
    ]


def overlaps() -> list[Row]:
    """Communication behind compute, in modules of FSDP2 and without modules."""
    small: Options = {"layouts": ("fsdp", "fsdp"), "sharded": True, "proof": "several buckets"}
    kept = {"release_grads": True, "keep_buffers": True}
    forward = {**MOVED, "released and kept": kept, "skip": SKIP, "skip missing": MISSING}
    network = {**FORWARD, "machine": SLOW_NETWORK}
    return [
        row("modules", **IN_MODULES),
        row("modules, 2 ranks", 2, ("fsdp", "owned"), sharded=True),
        row("modules owned", layouts=("owned", "owned, hsdp"), sharded=True),
        row("modules under DDP", 2, ("plain",), sharded=True),
        row("tensor parallelism alone", 2, ("tp rows", "tp columns"), sharded=True),
        row("forward", options=FORWARD, proof="several buckets", **IN_MODULES),
        row("forward, 2 ranks", 2, options={**FORWARD, **in_bytes(4_000)}, **small),
        *(row(f"forward, {name}", options={**FORWARD, **more}, **IN_MODULES) for name, more in forward.items()),
        row("forward, rule", options={**FORWARD, **RULE, "buffer_gib": "auto"}, proof="several buckets", **IN_MODULES),
        row("forward, hierarchical", layouts=("hsdp",), sharded=True, options=network, proof="hierarchical"),
        row("forward, original", options=FORWARD, math={"adjust_lr_fn": "original"}, **IN_MODULES),
    ]


def faults() -> list[Row]:
    """Missing and non-finite gradients: skipped, or an error with the name on every rank."""
    changes: dict[str, tuple[Any, str]] = {"nan": (torch.nan, NOT_FINITE), "missing": (DROP, "no gradient for")}
    expert = {"gradients": {1: ("experts", torch.nan)}, "options": SKIP}
    # The other one stays in the same call.
    one_elsewhere = {"gradients": {2: ("0.tall", ELSEWHERE)}, "error": ("0.tall",), "reference": "twin", **BFLOAT16}
    raised: Options = {"gradients": {2: ("uneven", torch.nan)}, "error": ("layers.0.uneven", NOT_FINITE)}
    changed: dict[str, Options] = {
        "all_gather": {"options": GATHERED, "gradients": {2: ("uneven", torch.inf)}},
        "all_gather_reduce_scatter": {"options": REDUCED, "gradients": {2: ("uneven", -torch.inf)}},
        "redundant": {"options": {"replicas": "redundant"}},
        "float32 wire": {"options": {"wire_dtype": "float32"}},
        "without nesterov": {"math": {"nesterov": False}},
        "bfloat16 momentum": {"math": {"state_dtype": "bfloat16"}, "reference": "twin"},
        "normuon": NORMUON,
        "adamuon": {**NORMUON, "math": ELEMENTS_SMOOTHED},
        "muonh": {**NORMUON, "math": SPHERE, "close": 1e-4},
    }
    made = [
        *(row(f"nan raises, {name}", **(raised | fields)) for name, fields in changed.items()),
        row("nan of an expert skipped", **expert),
        # The square of the element is above float32.
        row("overflow of a norm skipped", gradients={1: ("tall", 1e30)}, options=SKIP),
        row("missing skips the step", gradients={1: ("tall", DROP)}, options={**SKIP, "release_grads": True}),
        row("nan of an owned expert skipped", 2, ("owned", "fsdp"), **expert),
        row("elsewhere raises", layouts=SHARDED, gradients={2: ("tall", ELSEWHERE)}, error=("layers.0.tall",)),
        row("elsewhere in bfloat16 raises", 2, ("fsdp", "fsdp"), **one_elsewhere),
    ]
    for kind, (fields, options) in {
        "": ({}, {}),
        ", several buckets": ({}, SEVERAL),
        ", state owner": ({}, KEPT),
        ", forward": (IN_MODULES, FORWARD),
    }.items():
        for name, (change, text) in changes.items():
            skips = MISSING if change == DROP else SKIP
            skipped = {"gradients": {1: ("tall", change)}, "options": {**skips, **options}, **fields}
            raising = {"gradients": {2: ("uneven", change)}, "options": options, **fields}
            made.append(row(f"{name} skipped{kind}", **skipped))
            made.append(row(f"{name} raises{kind}", error=("layers.0.uneven", text), **raising))
    return made


def algorithms() -> list[Row]:
    """Arithmetic: hyperparameters, algorithms, decay, dtypes of state and weights."""
    zeros = {"gradients": {1: ("tall", 0.0), 2: ("experts", 0.0)}}
    torchs: dict[str, Options] = {
        "without nesterov": {"nesterov": False},
        "original": {"adjust_lr_fn": "original"},
        "three iterations": {"ns_steps": 3},
        "without decay": {"weight_decay": 0.0},
        "decay and momentum": {"weight_decay": 0.5, "momentum": 0.6},
    }
    papers: dict[str, Options] = {
        "normuon": ROWS_SMOOTHED,
        "adamuon": ELEMENTS_SMOOTHED,
        "adamuon without nesterov": {**ELEMENTS_SMOOTHED, "nesterov": False},
        "cautious": CAUTIOUS,
        "cautious normuon": {**ROWS_SMOOTHED, **CAUTIOUS},
        "decay follows lr": {"decay_follows_lr": True, "weight_decay": 0.5},
        "warm-up": {"momentum_warmup_steps": 2, "momentum_start": 0.5},
        "number": {"adjust_lr_fn": 0.18},
        "spectral": {"adjust_lr_fn": "spectral_unclamped"},
    }
    placed = {**MOVED, "several buckets": SEVERAL}
    int8 = {"state_dtype": "int8"}
    eight = {"shapes": FEW, "math": int8, "reference": "twin"}
    signs = {"reference": "paper", "math": ELEMENTS_SMOOTHED}
    return [
        *(row(name, math=math) for name, math in torchs.items()),
        *(row(name, layouts=(*MIXED, "owned"), math=math, reference="paper") for name, math in papers.items()),
        *(row(f"normuon, {name}", options=options, **NORMUON) for name, options in placed.items()),
        row("normuon, 2 ranks", 2, (*TWO, "owned"), **NORMUON),
        row("normuon, 8 ranks", 8, EIGHT, **NORMUON),
        row("normuon, splits", layouts=("fsdp x tp rows", "tp columns"), shapes=(*FUSED,), close=1e-4, **NORMUON),
        row("normuon, forward", options=FORWARD, **NORMUON, **IN_MODULES),
        row("normuon of a nan", options=SKIP, gradients={1: ("experts", torch.nan)}, **NORMUON),
        row("adamuon of a nan", options=SKIP, gradients={1: ("tall", torch.nan)}, **signs),
        row("cautious, forward", options=FORWARD, math=CAUTIOUS, reference="paper", **IN_MODULES),
        row("warm-up, several buckets", options=SEVERAL, math=papers["warm-up"], reference="paper"),
        row("soap", layouts=(*MIXED, "fsdp x tp columns", "owned"), **SOAP),
        row("soap, 2 ranks", 2, (*TWO, "owned"), **SOAP),
        row("soap, redundant", options={"replicas": "redundant"}, **SOAP),
        row("soap, all_gather", layouts=MIXED, options=GATHERED, **SOAP),
        row("soap, several buckets", options=in_bytes(20_000), proof="several buckets", **SOAP),
        row("soap, odd shapes", layouts=(*FOUR[:4], "owned"), **(SOAP | {"shapes": ("row", "prime", "single", "qkv")})),
        row("soap, forward", options=FORWARD, **SOAP, **IN_MODULES),
        row("soap of a nan", options=SKIP, gradients={0: ("tall", torch.nan), 2: ("experts", torch.nan)}, **SOAP),
        row("soap of a missing gradient", options=MISSING, gradients={1: ("experts", DROP)}, **SOAP),
        row("soap, nan raises", gradients={2: ("tall", torch.nan)}, error=("layers.0.tall",), **SOAP),
        row("soap of zeros", **zeros, **SOAP),
        row("soap, scaler", layouts=("hsdp",), scaler="scaled", **SOAP),
        row("soap, cautious", close=1e-4, **(SOAP | {"math": {**SOAP["math"], **CAUTIOUS}})),
        row("soap, reload", between={0: "reload"}, **SOAP),
        row("muoneq", layouts=(*MIXED, "owned"), reference="paper", math={ALGORITHM: "muoneq"}, shapes=FEW),
        row("muoneq, columns", shapes=FEW, reference="paper", math={ALGORITHM: "muoneq_columns"}),
        row("muoneq, both", layouts=("fsdp", "owned"), shapes=FEW, reference="paper", math={ALGORITHM: "muoneq_both"}),
        row("muoneq, splits", layouts=("fsdp",), shapes=(*FUSED,), reference="paper", math={ALGORITHM: "muoneq"}),
        row("normuonh", layouts=(*MIXED, "owned"), **(ON_SPHERE | {"shapes": FEW, "math": NORMUONH})),
        row("muoneq and normuon", layouts=("fsdp", "owned"), shapes=FEW, reference="paper", math=ROWS_BEFORE_AND_AFTER),
        row("muon and normuon", layouts=(*FOUR, "owned"), **MUON_AND_NORMUON),
        row("muon and normuon, 2 ranks", 2, (*TWO, "owned"), **MUON_AND_NORMUON),
        row("muon and normuon, state owner", options=KEPT, **MUON_AND_NORMUON),
        row("muon and normuon, offloaded", options={"offload": "state"}, **MUON_AND_NORMUON),
        row("muon and normuon, freeze and thaw", between={0: "freeze", 1: "thaw"}, **MUON_AND_NORMUON),
        row("normuon and soap", layouts=(*MIXED, "owned"), **NORMUON_AND_SOAP),
        row("normuon and soap, several buckets", options=in_bytes(30_000), proof="several buckets", **NORMUON_AND_SOAP),
        row("normuon and soap, forward", options=FORWARD, **NORMUON_AND_SOAP, **IN_MODULES),
        row("normuon and soap of a nan", options=SKIP, gradients={1: ("experts", torch.nan)}, **NORMUON_AND_SOAP),
        row("normuon and soap, scaler", layouts=("hsdp",), scaler="scaled", **NORMUON_AND_SOAP),
        row("normuon and soap, reload", between={0: "reload", 1: "new_optimizer"}, **NORMUON_AND_SOAP),
        row("muonh and muon", layouts=(*MIXED, "owned"), **MUONH_AND_MUON),
        row("muonh", layouts=(*MIXED, "owned"), **ON_SPHERE),
        row("muonh, 2 ranks", 2, (*TWO, "owned"), **ON_SPHERE),
        row("muonh, offloaded", options={"offload": "state"}, **ON_SPHERE),
        row("hold", layouts=(*MIXED, "owned"), math={"idle": "hold"}, reference="paper", **zeros),
        row("normuon held", math={**ROWS_SMOOTHED, "idle": "hold"}, reference="paper", **zeros),
        row("zero gradients move", **zeros),
        row("float64 weights", 2, ("plain", "fsdp"), dtype=torch.float64, between={1: "check"}, **ALONE),
        row("bfloat16 weights", layouts=("plain", "replicated", "fsdp"), **BFLOAT16, **ALONE),
        row("bfloat16 weights, new optimizer", layouts=TWO[:3], between={1: "new_optimizer"}, **BFLOAT16, **ALONE),
        row("bfloat16 weights to nearest", math={"rounding": "nearest"}, close=0.05, **BFLOAT16, **ALONE),
        row("bfloat16 weights, redundant", 2, TWO[:3], options={"replicas": "redundant"}, **BFLOAT16, **ALONE),
        row("bfloat16 weights, several buckets", options={**SEVERAL, **KEPT}, reference="twin", **BFLOAT16),
        row("bfloat16 weights, forward", options=FORWARD, reference="twin", **BFLOAT16, **IN_MODULES),
        row("bfloat16 momentum", math={"state_dtype": "bfloat16"}, **ALONE),
        row("bfloat16 momentum and weights", 4, TWO[:3], math={"state_dtype": "bfloat16"}, **BFLOAT16, **ALONE),
        row("int8 momentum", layouts=OWNED_LINES, shapes=FEW, options=int8, close=0.2, between={1: "check"}, **ALONE),
        row("int8 momentum, several buckets", layouts=LINES, options=SEVERAL, **eight),
        row("int8 momentum, forward", layouts=MODULES[:3], sharded=True, options=FORWARD, **eight),
        row("int8 momentum, reloaded", layouts=LINES, between={0: "reload", 1: "new_optimizer"}, **eight),
    ]


def batched() -> list[Row]:
    """Algorithms and faults where several equal matrices are one batch, which the reference's bits do not allow."""
    nan, zero = {"gradients": {1: ("experts", torch.nan)}}, {"gradients": {1: ("tall", 0.0), 2: ("experts", 0.0)}}
    made: dict[str, Options] = {
        "muon": {},
        "normuon": {"math": ROWS_SMOOTHED},
        "adamuon": {"math": ELEMENTS_SMOOTHED, "close": 1e-2},
        "muonh": {"math": SPHERE},
        "muon and muoneq": {"reference": "paper", "groups": SECOND["muoneq"], "shapes": FEW[:3]},
        "hold": {"math": {**ROWS_SMOOTHED, "idle": "hold"}, **zero},
        "nan skipped": {"math": ROWS_SMOOTHED, **nan},
        "nan raises": {"gradients": {2: ("uneven", torch.nan)}, "error": ("layers.0.uneven",)},
        "missing raises": {"gradients": {2: ("tall", DROP)}, "error": ("layers.1.tall",)},
    }
    layouts = ("fsdp", "fsdp", "fsdp", "tp columns")
    fields = {**CLOSE, "options": FLOAT32, "proof": "batches"}
    made["nan skipped"]["options"] = {**FLOAT32, **SKIP}
    return [row(f"batches, {name}", 2, layouts, **{**fields, **more}) for name, more in made.items()]


def actions() -> list[Row]:
    """Drivers of steps, and actions between steps."""
    kept = ("swap_and_rebuild", "reload", "new_optimizer")
    moves = ("swap_data", *kept, "move_to_host_and_back", "move_to_host", "check")
    frozen, how_scaled = {0: "freeze", 1: "thaw"}, ("scaled", "unscaled")
    scaled: dict[str, Options] = {
        "scaler, offloaded state": {"options": {"offload": "state"}},
        "scaler, offloaded parameters": {"options": {"offload": "parameters"}},
        "scaler, bfloat16 momentum": {"math": {"state_dtype": "bfloat16"}, **ALONE},
        "scaler, normuon": NORMUON,
        "scaler, adamuon": {**NORMUON, "math": ELEMENTS_SMOOTHED},
        "scaler, muonh": {**NORMUON, "math": SPHERE, "close": 1e-4},
    }
    return [
        *(row(name.replace("_", " "), layouts=(*MIXED, "owned"), between={0: name}) for name in moves),
        *(row(f"{name.replace('_', ' ')}, normuon", between={0: name}, **NORMUON) for name in kept),
        row("replace parameters", between={0: "replace_parameters"}),
        row("freeze and thaw", between=frozen),
        row("freeze and thaw, state owner", options=KEPT, between=frozen),
        row("move to the host and back, state owner", options=KEPT, between={0: "move_to_host_and_back"}),
        row("freeze and thaw, normuon", between=frozen, **NORMUON),
        row("reload, state owner", options=KEPT, between={0: "reload", 1: "swap_data"}),
        row("reload, forward", options=FORWARD, between={0: "reload", 1: "check"}, **IN_MODULES),
        *(row(f"scaler, forward, {how}", options=FORWARD, scaler=how, **IN_MODULES) for how in how_scaled),
        row("closure", closure=True),
        row("closure, forward", options=FORWARD, closure=True, **IN_MODULES),
        *(row(f"scaler, {layout}", layouts=(layout,), scaler="scaled") for layout in LINES),
        *(
            row(f"{name}, {how}", layouts=("hsdp",), scaler=how, **fields)
            for name, fields in scaled.items()
            for how in how_scaled
        ),
    ]
