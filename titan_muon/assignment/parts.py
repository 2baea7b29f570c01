"""The optimizers of a model: decisions, groups and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..options import Offload, Rule
from ..tensors.names import canonical_fqn
from .groups import ParamGroup, built, decided, frozen_in, named_parameters_of
from .roles import Seen, see
from .rules import Assignment, Default
from .table import decay_lines


@dataclass(frozen=True)
class Parts:
    """The optimizers of a model by name, with their groups.

    `assignments` has the trained parameters, and `whole` also those of remote pipeline stages. `order`: the names in
    all groups, in the model's order. `frozen`: names of parameters without gradients.
    """

    assignments: tuple[Assignment, ...]
    whole: tuple[Assignment, ...]
    groups: Mapping[str, Sequence[ParamGroup]]
    optimizers: Mapping[str, Optimizer]
    order: tuple[str, ...]
    frozen: tuple[str, ...]

    def decay_lines(self) -> list[str]:
        return decay_lines(group for groups in self.groups.values() for group in groups)


def parts_of(
    modules: Sequence[nn.Module],
    rules: Sequence[Rule],
    defaults: Sequence[Default] | None,
    tables: Mapping[str, Mapping[str, Any]],
    *,
    offload: Offload = "none",
    decay_vectors: bool = False,
    model: Mapping[str, Seen] | None = None,
    is_part: bool = False,
    knows_frozen: bool = False,
) -> Parts:
    """Assign every trained parameter of `modules` to an optimizer, and make the optimizers.

    `model`: all trained parameters of the model, if this process holds a pipeline stage. `knows_frozen`: whether groups
    have frozen parameters too, to be thawed later. The rest as in `decided`.
    """
    frozen = frozen_in(modules)
    parameters = {n: p for n, p in named_parameters_of(modules).items() if knows_frozen or n not in frozen}
    shared = {key: tables["muon"][key] for key in ("missing_grad", "nonfinite") if key in tables.get("muon", {})}
    tables = {**tables, "adamw": {**shared, **tables.get("adamw", {})}}
    seen = see(modules, canonical_fqn, frozen=knows_frozen) if model is None else model
    further: dict[str, Any] = {"is_stage": model is not None, "is_part": is_part, "decay_vectors": decay_vectors}
    decision = decided(seen, parameters, rules, defaults, tables, offload=offload, frozen=frozen, **further)
    optimizers = {
        name: built(name, groups, {"offload": offload, **decision.tables.get(name, {})}, parameters)
        for name, groups in decision.groups.items()
    }
    assignments = tuple(a for a in decision.whole if a.fqn in parameters)
    return Parts(assignments, decision.whole, decision.groups, optimizers, tuple(parameters), tuple(sorted(frozen)))
