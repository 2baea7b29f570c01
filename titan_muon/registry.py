"""Registries of optimizers, algorithms, placements and models by the names in recipes.

Another package adds a name by an entry point in the group `titan_muon.optimizers`, `titan_muon.algorithms`,
`titan_muon.placements` or `titan_muon.models`, loaded at the first use of the name, or by calling `register`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from .options import MuonOptions
from .removed import VALUES

T = TypeVar("T")


class Registry(Generic[T]):
    """Values by name. `key`: recipe key, for messages. `group`: group of entry points.

    `own`: names that this package registers together with the import of PyTorch, so that a recipe is checked before.
    """

    def __init__(self, key: str, group: str, own: Sequence[str] = ()) -> None:
        self.key = key
        self.group = group
        self.own = own
        self._values: dict[str, T] = {}

    def register(self, name: str, value: T) -> None:
        if name in self._values:
            raise ValueError(f"{self.key}: {name!r} is registered already; choose another name")
        self._values[name] = value

    def get(self, name: str) -> T:
        """The value of a name. Raises ValueError for an unknown name or several entry points."""
        if name in self._values:
            return self._values[name]
        entries = tuple(entry_points(group=self.group, name=name))
        if len(entries) > 1:
            raise ValueError(f"{self.key} = {name!r} is offered by {', '.join(e.value for e in entries)}; keep one")
        if entries:
            self.register(name, entries[0].load())
            return self._values[name]
        raise UnknownName(self.key, name, self.names())

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self._values or bool(entry_points(group=self.group, name=name))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.own, *self._values, *(entry.name for entry in entry_points(group=self.group))}))


class UnknownName(ValueError):
    """An unknown name in the recipe's `key`. `problem` has the remedy, `choices` the nearest and all known names."""

    def __init__(self, key: str, name: str, known: Sequence[str]) -> None:
        matches = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {matches[0]!r}? " if matches else ""
        self.key, self.choices = key, f"{hint}choose from: {', '.join(known)}"
        self.problem = f"= {name!r} {VALUES.get((key, name), f'is unknown; {self.choices}')}"
        super().__init__(f"{key} {self.problem}")


@dataclass(frozen=True)
class OptimizerEntry:
    """How to build an optimizer.

    Attributes:
        build: called with parameter groups (`params`, `param_names` and hyperparameters) and the options in `shared`;
            returns a torch.optim.Optimizer with all hyperparameters in `defaults`.
        shared: options of the whole optimizer.
        by_rule: those of `shared` that a rule may set for its parameters, as a key of their group.
    """

    build: Callable[..., Any]
    shared: Sequence[str] = ()
    by_rule: Sequence[str] = ()


optimizers: Registry[OptimizerEntry] = Registry("optimizer", "titan_muon.optimizers", own=("adamw", "muon"))


algorithms: Registry[Callable[[MuonOptions], Any]] = Registry(
    "algorithm",
    "titan_muon.algorithms",
    own=("adamuon", "muon", "muoneq", "muoneq_both", "muoneq_columns", "muonh", "normuon", "soap"),
)
"""Functions from the options of Muon to a `step.algorithm.Algorithm`."""

Parallelize = Callable[..., Any]
"""TorchTitan's parallelize_fn: (model, *, parallel_dims, training, parallelism, ...) -> model."""

placements: Registry[Callable[[Parallelize, Any], Parallelize]] = Registry(
    "placement.muon", "titan_muon.placements", own=("owned",)
)
"""Functions from a parallelize_fn and the recipe to a changed parallelize_fn."""
placements.register("shard0", lambda parallelize, recipe: parallelize)


@dataclass(frozen=True)
class ModelFamily:
    """Models of one architecture. `flavors`: returns the names for `model.flavor`. `build`: from a flavor and a
    vocabulary size (None: the default), returns a new TorchTitan ModelSpec.
    """

    flavors: Callable[[], Sequence[str]]
    build: Callable[[str, int | None], Any]


models: Registry[ModelFamily] = Registry("model.name", "titan_muon.models")


def shared_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` in `shared` of the optimizer `name`."""
    return {key: value for key, value in options.items() if key in optimizers.get(name).shared}
