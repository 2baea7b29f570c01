"""The optimizer of each parameter: by rules, then role, name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ..options import OptionError, Rule, Split
from ..tensors.matrices import split_of
from ..tensors.names import LOOKED_UP
from .roles import ParameterInfo, Role


@dataclass(frozen=True)
class Default:
    """Default for parameters without a matching rule: by role, or without a role by the glob `match`."""

    match: str
    optimizer: str
    reason: str
    role: Role = ""


@dataclass(frozen=True)
class Assignment:
    """The optimizer of a parameter. `rule`: index of the deciding rule, or None for a default."""

    fqn: str
    shape: tuple[int, ...]
    optimizer: str
    reason: str
    rule: int | None
    role: Role = ""
    split: Split | None = None

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is a vector, or several: biases, scales of norms."""
        return len(self.shape) < 2 or self.role in ("bias", "norm")


EMBEDDING, HEAD = "embedding: its rows are looked up, not multiplied", "output head"
# Shapes do not distinguish these matrices, which Muon is not meant for (Keller Jordan, 2024).
BY_ROLE = (
    Default("", "adamw", EMBEDDING, "embedding"),
    Default("", "adamw", HEAD, "head"),
    Default("", "adamw", "factor of LoRA: of low rank", "lora"),
    Default("", "adamw", "convolution: a rule and a split in dims give it to Muon", "convolution"),
    Default("", "adamw", "scale of a norm", "norm"),
    Default("", "adamw", "biases, one vector beside the other", "bias"),
    Default("", "adamw", "table: its rows are added or looked up, not multiplied", "table"),
    Default("", "adamw", "acts element by element, and is no matrix", "elementwise"),
)
BY_NAME = (*(Default(name, "adamw", EMBEDDING if "embed" in name else HEAD) for name in LOOKED_UP),)


def default_rules(router: str = "adamw") -> tuple[Default, ...]:
    """The defaults before shapes decide. `router`: optimizer of the gates of mixtures of experts."""
    reason = "router of a mixture of experts (router)"
    routers = Default("", router, reason, "router"), Default("*.router.*weight", router, reason)
    return (*BY_ROLE, *BY_NAME, *routers)


def splits_with(known: Sequence[Split], assigned: Iterable[Assignment]) -> tuple[Split, ...]:
    """The recipe's splits, plus splits of known fused layouts of Muon parameters without one."""
    fused = [(a.fqn, a.split) for a in assigned if a.optimizer == "muon" and a.split is not None]
    return (*known, *(split for fqn, split in fused if split_of(fqn, known) is None))


def assign_parameters(
    parameters: Mapping[str, ParameterInfo],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    *,
    all_rules: bool = True,
) -> tuple[Assignment, ...]:
    """An optimizer for each parameter, from the first matching rule.

    Without a rule, `defaults` decide by role and then by name, and then shapes: Muon takes matrices, stacks of experts
    and known fused layouts, AdamW the rest. Raises OptionError for undecided parameters if `defaults` is None and, with
    `all_rules`, for rules without parameters.
    """
    assigned = tuple(_assign_one(fqn, seen, rules, defaults or ()) for fqn, seen in parameters.items())
    if all_rules:
        _refuse_unused(rules, assigned)
    undecided = [a.fqn for a in assigned if a.rule is None] if defaults is None else []
    if undecided:
        raise OptionError(
            "rules:",
            f"no rule matches {', '.join(undecided[:5])}{' ...' if len(undecided) > 5 else ''} "
            f"({len(undecided)} parameters); add a rule, or keep the defaults (defaults = true)",
        )
    return assigned


def _refuse_unused(rules: Sequence[Rule], assigned: Sequence[Assignment]) -> None:
    used = {assignment.rule for assignment in assigned}
    unused = [(index, rule.match) for index, rule in enumerate(rules) if index not in used]
    if unused:
        index, match = unused[0]
        nearest = get_close_matches(match, [assignment.fqn for assignment in assigned], 1, 0.3)
        hint = f" The nearest name is {nearest[0]}." if nearest else ""
        more = f" The same holds for {', '.join(repr(other) for _, other in unused[1:])}." if unused[1:] else ""
        raise OptionError(
            f"rules[{index}]:",
            f"{match!r} takes no parameter: no parameter has such a name, or rules before take all of them; correct "
            f"it, move it up or remove it.{hint}{more}",
        )


def _assign_one(fqn: str, seen: ParameterInfo, rules: Sequence[Rule], defaults: Sequence[Default]) -> Assignment:
    def to(optimizer: str, reason: str, rule: int | None = None) -> Assignment:
        return Assignment(fqn, seen.shape, optimizer, reason, rule, seen.role, seen.split)

    # Not fnmatch, which ignores case on some systems.
    for index, rule in enumerate(rules):
        if fnmatchcase(fqn, rule.match):
            return to(rule.optimizer, f"optimizer.rule[{index}] {rule.match!r}", index)
    # Vectors ignore defaults, and names decide only without a role.
    for default in defaults if len(seen.shape) > 1 else ():
        if default.role == seen.role if seen.role else fnmatchcase(fqn, default.match):
            return to(default.optimizer, default.reason)
    return to(*_by_shape(fqn, seen))


def _by_shape(fqn: str, seen: ParameterInfo) -> tuple[str, str]:
    shape = seen.shape
    if len(shape) < 2:
        return "adamw", "vector: norm, bias or scale"
    if seen.split is not None:
        return "muon", f"known layout: {seen.split.dims}"
    if len(shape) == 2:
        return ("adamw", "vector: one row or column") if 1 in shape else ("muon", "hidden matrix")
    # Weights of 1D convolutions are 3D too.
    if len(shape) == 3 and (seen.role == "experts" or "expert" in fqn):
        return "muon", "stack of expert matrices"
    return "adamw", f"{len(shape)}D and not a stack of experts"
