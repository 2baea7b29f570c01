"""Muon's arguments: the parts that options select for the engine, and checks of parameters and groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import registry
from .engine.engine import Selection
from .engine.planning import Planner, plan_by_rule
from .engine.step.algorithm import Algorithm, Group
from .engine.step.feature import Feature
from .engine.tensors.dtensor import CHUNKS, local
from .engine.tensors.names import canonical_fqn, families, listed, named_parameters
from .engine.tensors.storage import STEP, check_group, coefficient_rows
from .matrices.stacks import check_splits, matrix_shapes, split_of, stack_of
from .options import (
    EXPERT,
    HYPERPARAMETERS,
    OTHER_NAMES,
    SHARED,
    MuonOptions,
    OptionError,
    Split,
    check,
    refuse_removed,
)

ALGORITHMS: Mapping[str, tuple[str, str]] = {
    "muon": (".engine.step.muon", "MuonAlgorithm"),
    "normuon": (".algorithms.second_moment", "NorMuon"),
    "adamuon": (".algorithms.second_moment", "AdaMuon"),
    "muoneq": (".algorithms.muoneq", "MuonEq"),
    "muoneq_columns": (".algorithms.muoneq", "MuonEqColumns"),
    "muoneq_both": (".algorithms.muoneq", "MuonEqBoth"),
    "muonh": (".algorithms.muonh", "MuonH"),
    "soap": (".algorithms.soap", "Soap"),
}
"""File and class of each algorithm."""


class Entry(NamedTuple):
    """A feature: file, class, and whether options and an algorithm ask for it."""

    file: str
    name: str
    is_on: Callable[[MuonOptions, Algorithm], bool]


FEATURES: Sequence[Entry] = (
    Entry(".features.owner_state", "OwnerStateFeature", lambda options, algorithm: options.state == "owner"),
    Entry(".features.offload", "OffloadFeature", lambda options, algorithm: options.offload != "none"),
    Entry(".kernels.fused", "FusedFeature", lambda options, algorithm: options.fused is True),
    Entry(".kernels.graph", "GraphFeature", lambda options, algorithm: options.cuda_graph is True),
    Entry(".features.weight_norms", "WeightNormsFeature", lambda options, algorithm: algorithm.sums_norms),
    Entry(".features.mask", "IdleFeature", lambda options, algorithm: options.idle == "hold"),
    # The outermost decorator, because restored numbers would not fit restored scales.
    Entry(".features.eight_bit", "EightBitFeature", lambda options, algorithm: options.state_dtype == "int8"),
    Entry(".features.forward", "ForwardFeature", lambda options, algorithm: options.overlap == "forward"),
)
"""Every feature, in the order in which the engine calls them. To delete one, delete its file and its line."""


def _imported(file: str, name: str, *arguments: Any) -> Any:
    """An instance of a class. Imports the file at the first use."""
    return getattr(import_module(file, __package__), name)(*arguments)


def features_of(options: MuonOptions, algorithm: Algorithm) -> tuple[Feature, ...]:
    """The features that are on. Imports their files and no others."""
    return tuple(_imported(entry.file, entry.name) for entry in FEATURES if entry.is_on(options, algorithm))


for _name, _place in ALGORITHMS.items():
    registry.algorithms.register(_name, partial(_imported, *_place))


# Imports are local, so that `from titan_muon import Muon` and a step by the rule import no code of the search.


def select(
    options: MuonOptions, groups: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor], device: torch.device
) -> Selection:
    """The parts for trained parameters, each with a group. Raises OptionError for an unreadable file of a machine."""
    algorithm, note = algorithm_of(options, groups), ""
    if options.fused == "auto":
        if device.type == "cuda":
            from .kernels.fused import foreach_reason

            note = foreach_reason(options, algorithm, tensors)
        options = replace(options, fused=device.type == "cuda" and not note)
    if options.cuda_graph == "auto":
        options = replace(options, cuda_graph=False)
    elif options.cuda_graph:
        # A graph repeats addresses.
        options = replace(options, keep_buffers=True)
        kept = "a step is one CUDA graph, not measured on a GPU, and its buffers and workspace stay between steps"
        note = "; ".join(filter(None, (note, kept)))
    from .kernels.dispatch import Dispatch, kernels_for

    dispatch = Dispatch(options.orthogonalize, options.ns_dtype, device.type)
    planner: Planner = plan_by_rule
    if device.type == "cuda" or options.ns_kernel not in ("auto", "plain"):
        dispatch = replace(dispatch, kernels=kernels_for(options.ns_kernel, device))
    if options.planner != "rule":
        from .planner.machine import planning_machine
        from .planner.planner import plan_by_search

        machine = planning_machine(options.machine, device.type)
        dispatch, planner = replace(dispatch, gpu=machine), partial(plan_by_search, machine=machine)
    stacks = partial(stack_of, splits=options.split)
    rounding = None
    if options.rounding == "stochastic" and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        from .features.rounding import StochasticRounding

        rounding = StochasticRounding()
    return Selection(options, algorithm, dispatch, planner, stacks, features_of, rounding, note)


def algorithm_of(options: MuonOptions, groups: Sequence[Group] = ()) -> Algorithm:
    """The algorithm of the options, or of parameters by their `groups`. A group's key `algorithm` precedes the options.

    Raises OptionError for an unknown name, and for options without a meaning for the algorithm.
    """
    for name in options.algorithm_options:
        if name not in registry.algorithms:
            unknown = registry.UnknownName(name, name, registry.algorithms.names())
            raise OptionError(f"algorithm_options.{name}", f"belongs to no algorithm; {unknown.choices}")
    choices = _choices(options, groups) or [options.algorithm]
    made = {}
    for choice in dict.fromkeys(choices):
        alone = replace(options, algorithm=choice)
        algorithms = [_named(name, alone) for name in alone.algorithms]
        made[choice] = algorithms[0]
        if len(algorithms) > 1:
            from .algorithms.several import Composed

            made[choice] = Composed(alone, algorithms)
    if len(made) == 1:
        return made[choices[0]]
    from .algorithms.several import ByParameter

    return ByParameter(options, [made[choice] for choice in choices])


def algorithms_in(options: MuonOptions, groups: Sequence[Group]) -> tuple[str, ...]:
    """The names of the algorithms of all groups."""
    return tuple(sorted({name for c in _choices(options, groups) for name in replace(options, algorithm=c).algorithms}))


def choice_of(algorithm: Any) -> Any:
    """A name as it is, and a list of names as a tuple."""
    return tuple(algorithm) if isinstance(algorithm, Sequence) and not isinstance(algorithm, str) else algorithm


def _choices(options: MuonOptions, groups: Sequence[Group]) -> list[str | tuple[str, ...]]:
    return [choice_of(group.get("algorithm", options.algorithm)) for group in groups]


def check_group_algorithm(options: MuonOptions, group: Group) -> None:
    """Raise OptionError for hyperparameters without a meaning for the group's algorithm."""
    try:
        algorithm_of(options, [group]).check_group(group)
    except OptionError as error:
        if "algorithm" not in group:
            raise
        # A remedy is for this group alone.
        raise OptionError(
            error.option, f"{error.problem}, in the group of {listed(group['param_names'], 2)}"
        ) from error


def check_groups(options: MuonOptions, groups: Sequence[Group]) -> None:
    """Raise ValueError as `check_group`, `check_group_algorithm` and `check_splits`."""
    for group in groups:
        check_group(group)
        check_group_algorithm(options, group)
    # A pipeline stage may have no matrices at all.
    if names := [name for name, _ in named_parameters(groups)]:
        check_splits(names, options.split)


UNSCALED = frozenset({"muon", "muoneq", "muoneq_both", "muoneq_columns", "muonh"})
"""Algorithms without an average of squares."""


def check_used(options: MuonOptions, algorithms: Collection[str]) -> None:
    """Raise OptionError for an option without effect on these algorithms, of all groups: a frozen one may thaw."""
    for name, needed, is_used in (
        ("beta2", "algorithm = 'normuon', 'adamuon' or 'soap'", not UNSCALED.issuperset(algorithms)),
        ("soap_freq", "algorithm = 'soap'", "soap" in algorithms),
        ("momentum_start", "momentum_warmup_steps", options.momentum_warmup_steps > 0),
    ):
        value = getattr(options, name)
        if not is_used and value != getattr(MuonOptions, name):
            raise OptionError(name, f"= {value} has no effect without {needed}; set both, or neither")


def _named(name: str, options: MuonOptions) -> Algorithm:
    try:
        make = registry.algorithms.get(name)
    except ValueError as error:
        raise OptionError("algorithm", str(error).removeprefix("algorithm ")) from error
    algorithm: Algorithm = make(options)
    algorithm.own = _own_options(algorithm.Options, name, options.algorithm_options.get(name, {}))
    return algorithm


TYPES: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _own_options(table: type | None, algorithm: str, given: Mapping[str, Any]) -> Any:
    """An instance of `table`, or None. Raises OptionError for an unknown key, a wrong type and a value out of range."""
    place = f"algorithm_options.{algorithm}"
    kinds = {} if table is None else get_type_hints(table)
    for key, value in given.items():
        if key not in kinds:
            takes = f"takes {', '.join(kinds)}" if kinds else "has no options of its own"
            raise OptionError(f"{place}.{key}", f"is unknown; leave it out: the algorithm {takes}")
        kind = kinds[key]
        if kind in TYPES and type(value) is not kind and not (kind is float and type(value) is int):
            raise OptionError(f"{place}.{key}", f"= {value!r} is not accepted; it takes {TYPES[kind]}")
    if table is None:
        return None
    values = {key: float(value) if kinds[key] is float else value for key, value in given.items()}
    check(table, values, f"{place}.")
    try:
        return table(**values)
    except (TypeError, ValueError) as error:
        raise OptionError(place, f"= {values} is not accepted: {error}") from error


# --- parameters and groups ---

KEYS = (*HYPERPARAMETERS, "algorithm", "params", "param_names", "initial_lr", "optimizer", STEP)
"""Keys of a group that this package reads or writes."""

DIONS = ("adamw", "lion")
"""Values of `algorithm` that mark groups of another optimizer in dion."""
SIMILAR = 0.85
"""Ratio of equal letters above which an unknown key is a misspelt key. Below: `max_momentum`, of OneCycleLR."""
LOOKED_UP = ("*embed*", "*lm_head*", "output.weight")
"""Embeddings and output heads. `output.weight` has no star, because hidden layers also have projections called
output."""
THINNEST = 16
"""Side of a matrix below which Newton-Schulz changes little."""
MARKS = ("megatron_fsdp_dist_index", "_mfsdp_parameter_group")
"""Attributes of a parameter of Megatron-FSDP, of the classic implementation and of the experimental one."""
FLEX_SHARD = ("_placements", "_global_shape")
"""Attributes of a parameter in a bucket of FlexShard (pytorch/torchtitan#3502), a plain tensor with a rank's part."""


def splits_of(splits: Any) -> tuple[Split, ...]:
    """The argument `split` of Muon. Raises OptionError for anything but a sequence of Split."""
    given = tuple(splits) if isinstance(splits, Sequence) else (splits,)
    for split in given:
        if not isinstance(split, Split) or not isinstance(splits, Sequence):
            remedy = (
                "pass a list, as split=[titan_muon.Split(match='*.qkv', dims='(p h) d -> p | h d', lengths={'p': 3})]"
            )
            raise OptionError("split", f"= {split!r} is not accepted; {remedy}")
    return given


def given_groups(params: Any, *, alone: bool) -> Any:
    """The constructor's parameters or groups, as torch's constructor takes them. Raises ValueError for a model.

    `alone`: whether no other rank has parameters, so that torch may refuse an empty list.
    """
    if isinstance(params, nn.Module):
        raise ValueError(
            "Muon takes named matrices, not a model; use titan_muon.Hybrid(model), or "
            "Muon(titan_muon.parameter_groups(model)['muon'])"
        )
    if isinstance(params, Tensor):
        return params
    groups = list(params)
    # torch accepts an empty group, and a pipeline stage may have no matrices.
    return groups if groups or alone else [{"params": [], "param_names": []}]


def named_group(group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, alone: bool) -> dict[str, Any]:
    """The user's group with names, and with coefficients by step.

    `others`: earlier groups. `alone`: whether a single process may name parameters `number.index`.
    """
    check_keys(group)
    result, params = dict(group), group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    numbered = alone and all(other["param_names"] == _numbers(i, other["params"]) for i, other in enumerate(others))
    pairs = bool(params) and not isinstance(params[0], Tensor)
    if not pairs and "param_names" not in result:
        if numbered:
            result["param_names"] = _numbers(len(others), params)
    elif others and numbered:
        raise ValueError("this group has names, and the groups before it have none; give every parameter its name")
    elif pairs:
        params = [(canonical_fqn(name), parameter) for name, parameter in params]
    else:
        result["param_names"] = [canonical_fqn(name) for name in result["param_names"]]
    if "ns_coefficients" in result:
        result["ns_coefficients"] = coefficient_rows(result["ns_coefficients"])
    return {**result, "params": params}


def _numbers(group: int, params: Sequence[Tensor]) -> list[str]:
    return [f"{group}.{index}" for index in range(len(params))]


def check_keys(group: Mapping[str, Any]) -> None:
    """Raise OptionError if a new group has a key that belongs to Muon instead of a group, or is nearly a key of ours.

    All other keys pass, because schedulers and other libraries have keys of their own, as timm's `lr_scale`.
    """
    for key, value in group.items():
        if key in SHARED and key not in KEYS:
            written = f"expert=Expert({key}=...)" if key in EXPERT else "it"
            raise OptionError(key, f"holds for all parameters of a Muon; pass {written} to Muon instead of a group")
        if (key == "use_muon" and not value) or (key == "algorithm" and value in DIONS):
            raise OptionError(
                key,
                f"= {value!r} marks parameters of another algorithm; give them to titan_muon.adamw.AdamW, or the whole "
                "model to titan_muon.Hybrid",
            )
        if key == "maximize" and value:
            raise OptionError(key, "is not a key of a Muon group; negate the loss")
        refuse_removed([key])
        # Layer decay's `lr_scale` is a number.
        name = OTHER_NAMES.get(key) if key != "lr_scale" or isinstance(value, str) else None
        similar = [] if key in KEYS else get_close_matches(key, (*KEYS, *SHARED), 1, SIMILAR)
        if name or similar:
            raise OptionError(key, f"is not a key of a Muon group; did you mean {name or similar[0]}?")


def check_params(group: Mapping[str, Any], splits: Sequence[Split]) -> None:
    """Raise ValueError for parameters of a new group without names or without matrices."""
    check_group(group)
    for fqn, parameter in named_parameters([group]):
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"{fqn}: has dtype {parameter.dtype}, and Muon trains real floating-point matrices; train a complex "
                "parameter by torch.view_as_real, or give it to another optimizer"
            )
        stack_of(fqn, parameter.shape, splits)


def check_places(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a trained parameter of which this rank's part has an unknown place."""
    for fqn, parameter in ((fqn, parameter) for fqn, parameter in named if parameter.requires_grad):
        if not isinstance(parameter, DTensor):
            if all(hasattr(parameter, name) for name in FLEX_SHARD):
                raise ValueError(
                    f"{fqn}: a bucket of FlexShard stores a part of this parameter as a plain tensor, which would be "
                    "taken for a whole matrix; shard the model by fully_shard, with titan_muon.own for whole matrices "
                    "on single ranks"
                )
            continue
        # The mesh has the order of axes even where the parameter was copied.
        is_megatrons = any(hasattr(parameter, mark) for mark in MARKS) or hasattr(parameter.device_mesh, "_shard_order")
        if is_megatrons and not hasattr(local(parameter), CHUNKS):
            raise ValueError(
                f"{fqn}: Megatron-FSDP sharded this parameter, and its placements do not tell which rows are on which "
                "rank; call titan_muon.follow_megatron_fsdp(optimizer, model) before the first step, in place of "
                "fully_shard_optimizer"
            )


def doubts_of(group: Mapping[str, Any], splits: Sequence[Split]) -> Iterator[str]:
    """Warnings about parameters for another optimizer."""
    trained = [pair for pair in named_parameters([group]) if pair[1].requires_grad]
    looked_up = [fqn for fqn, _ in trained if any(fnmatchcase(fqn, pattern) for pattern in LOOKED_UP)]
    if looked_up:
        yield (
            f"{listed(looked_up, 3)}: an embedding or output head by its name, which Muon is not meant for; give it to "
            "AdamW, or give the model to titan_muon.Hybrid"
        )
    yield from doubts_about({fqn: parameter.shape for fqn, parameter in trained}, splits)


def doubts_about(
    shapes: Mapping[str, Sequence[int]], splits: Sequence[Split], experts: Collection[str] = ()
) -> Iterator[str]:
    """Warnings about parameters of Muon by name: thin matrices, and stacks that may be convolutions.

    `experts`: stacks of experts, whatever their names.
    """
    stacks = {fqn: stack_of(fqn, shape, splits) for fqn, shape in shapes.items()}
    sizes = {fqn: f" ({'x'.join(map(str, shape))})" for fqn, shape in shapes.items()}
    if thin := [f for f in shapes if min(map(min, matrix_shapes(shapes[f], stacks[f]))) < THINNEST]:
        yield f"{families(thin, sizes)}: a side under {THINNEST}, so that Muon does little for it"
    stacked = [f for f in shapes if len(shapes[f]) == 3 and f not in experts and "expert" not in f.lower()]
    if unnamed := [fqn for fqn in stacked if split_of(fqn, splits) is None]:
        yield (
            f"{families(unnamed)}: taken as a stack of matrices, one for each index of dim 0; for one matrix, as of a "
            "convolution, write muon.split with dims = 'f b1 d -> | f (b1 d)', and for a stack 'b1 f d -> b1 | f d'"
        )
