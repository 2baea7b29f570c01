"""The optimizer of each parameter: by rules, then role, name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType

from ..matrices.stacks import split_of
from ..options import OptionError, Split
from ..selection import LOOKED_UP
from .options import Rule
from .roles import ParameterInfo, Role

IS_MUON = "is_muon"
"""Reason of a decision by the user's predicate."""


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
    def by_default(self) -> bool:
        """Whether neither a rule nor `is_muon` decided."""
        return self.rule is None and self.reason != IS_MUON

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is a vector, or several: biases, scales of norms."""
        return len(self.shape) < 2 or self.role in ("bias", "norm")


EMBEDDING, HEAD = "embedding: its rows are looked up, not multiplied", "output head"
# Shapes do not distinguish these matrices, which Muon is not meant for (Keller Jordan, 2024).
REASONS: Mapping[Role, str] = MappingProxyType(
    {
        "embedding": EMBEDDING,
        "head": HEAD,
        "router": "router of a mixture of experts (router)",
        "lora": "factor of LoRA: of low rank",
        "convolution": "convolution: a rule and a split in dims give it to Muon",
        "norm": "scale of a norm",
        "bias": "biases, one vector beside the other",
        "table": "table: its rows are added or looked up, not multiplied",
        "elementwise": "acts element by element, and is not a matrix",
    }
)
"""Roles that AdamW trains, or the optimizer of routers."""
BY_NAME: tuple[tuple[str, Role], ...] = (
    *((name, "embedding" if "embed" in name else "head") for name in LOOKED_UP),
    ("*.router.*weight", "router"),
)
"""Roles by the name of a parameter without one."""


def splits_with(known: Sequence[Split], assigned: Iterable[Assignment]) -> tuple[Split, ...]:
    """The recipe's splits, plus splits of known fused layouts of Muon parameters without one."""
    fused = [(a.fqn, a.split) for a in assigned if a.optimizer == "muon" and a.split is not None]
    return (*known, *(split for fqn, split in fused if split_of(fqn, known) is None))


def assign_parameters(
    parameters: Mapping[str, ParameterInfo],
    rules: Sequence[Rule],
    router: str | None = "adamw",
    *,
    all_rules: bool = True,
) -> tuple[Assignment, ...]:
    """An optimizer for each parameter, from the first matching rule.

    Without a rule, the user's `is_muon` decides, then the role, by module or else by name, and then the shape: Muon
    takes matrices, stacks of experts and known fused layouts, AdamW the rest. `router` is the optimizer of the gates of
    mixtures of experts, or None if rules must decide for every parameter.

    Raises OptionError for an undecided parameter, and for rules without parameters, if `all_rules`.
    """
    assigned = tuple(_assign_one(fqn, seen, rules, router) for fqn, seen in parameters.items())
    if all_rules:
        _refuse_unused(rules, assigned)
    undecided = [a.fqn for a in assigned if a.by_default] if router is None else []
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


def _assign_one(fqn: str, seen: ParameterInfo, rules: Sequence[Rule], router: str | None) -> Assignment:
    def to(optimizer: str, reason: str, rule: int | None = None) -> Assignment:
        return Assignment(fqn, seen.shape, optimizer, reason, rule, seen.role, seen.split)

    # Not fnmatch, which ignores case on some systems.
    for index, rule in enumerate(rules):
        if fnmatchcase(fqn, rule.match):
            return to(rule.optimizer, f"optimizer.rule[{index}] {rule.match!r}", index)
    if seen.is_muon is not None:
        return to("muon" if seen.is_muon else "adamw", IS_MUON)
    role = seen.role or next((role for pattern, role in BY_NAME if fnmatchcase(fqn, pattern)), "")
    # A vector is a vector, in any role.
    if len(seen.shape) > 1 and role in REASONS:
        return to(router or "adamw" if role == "router" else "adamw", REASONS[role])
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
