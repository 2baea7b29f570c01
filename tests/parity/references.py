"""References of rows: torch.optim.Muon, the algorithms from their papers, or Muon itself, in one process."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.layouts import assembled, drawn, matrices
from tests.reference_muon import ReferenceMuon, ReferenceSoap
from tests.shared import muon_keywords
from titan_muon import Muon

LR = 0.02
ALGORITHM = "algorithm"
"""Muon's keyword for the arithmetic of an update."""
Options = Mapping[str, Any]
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Factors on the learning rates of a row's steps."""
OTHER_GROUP: Options = {"lr": 0.01, "momentum": 0.8, "nesterov": False, "weight_decay": 0.4}
"""Hyperparameters of a second group."""


Reference = Any
"""Trains whole parameters: `step(number, grads, left_out)`, `weight(name)` and `states(name)`. `left_out`: matrices
without an update, by name of the parameter and number."""


def in_groups(names: list[str], other: Options) -> Iterator[tuple[list[str], Options]]:
    """Names by group, and the hyperparameters of the group. Every other parameter is in the second one, if any."""
    yield (names[::2] if other else names), {}
    if other:
        yield names[1::2], other


def groups(pairs: Mapping[str, Any], other: Options) -> list[dict[str, Any]]:
    return [
        {"params": [pairs[name] for name in part], "param_names": part, **more}
        for part, more in in_groups(list(pairs), other)
    ]


class TorchMuon:
    """torch.optim.Muon on each matrix."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        self.parts = {name: [nn.Parameter(m) for m in matrices(name, drawn(name, 0))] for name in names}
        given = groups(self.parts, other)
        for group in given:
            group["params"] = [part for parts in group["params"] for part in parts]
            del group["param_names"]
        options = {"adjust_lr_fn": "match_rms_adamw", "lr": LR, **options}
        self.muon = torch.optim.Muon(given, **options)
        self.rates = [group["lr"] for group in self.muon.param_groups]

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        for group, initial in zip(self.muon.param_groups, self.rates, strict=True):
            group["lr"] = initial * RATES[number]
        for name, parts in self.parts.items():
            for index, (part, grad) in enumerate(zip(parts, matrices(name, grads[name]), strict=True)):
                part.grad = None if (name, index) in left_out else grad
        self.muon.step()

    def weight(self, name: str) -> Tensor:
        return assembled(name, [part.detach() for part in self.parts[name]])

    def states(self, name: str) -> dict[str, Tensor]:
        zeros = [{"momentum_buffer": torch.zeros_like(part)} for part in self.parts[name]]
        states = [self.muon.state.get(part, zero) for part, zero in zip(self.parts[name], zeros, strict=True)]
        return {"momentum_buffer": assembled(name, [state["momentum_buffer"] for state in states])}


class Papers:
    """The definitions in tests/reference_muon.py on each matrix, by group."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        self.references = dict[str, ReferenceMuon | ReferenceSoap]()
        for part, more in in_groups(names, other):
            own = {"lr": LR, **options, **more}
            initial, made = _parts({name: drawn(name, 0) for name in part}), own.get(ALGORITHM)
            # An option of another group's algorithm is none of this one's.
            unused = (ALGORITHM,) if made == "soap" else ("soap_freq",)
            own = {name: value for name, value in own.items() if name not in unused}
            reference = ReferenceSoap(initial, **own) if made == "soap" else ReferenceMuon(initial, dtype=dtype, **own)
            self.references |= dict.fromkeys(part, reference)
        self.rates = {name: reference.lr for name, reference in self.references.items()}

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        without = {f"{name}#{index}" for name, index in left_out}
        trained = {key: grad for key, grad in _parts(grads).items() if key not in without}
        # Equal references are one object.
        for reference, name in {reference: name for name, reference in self.references.items()}.items():
            reference.lr = self.rates[name] * RATES[number]
            reference.step({key: grad for key, grad in trained.items() if key in reference.params})

    def weight(self, name: str) -> Tensor:
        return _whole(self.references[name].params, name)

    def states(self, name: str) -> dict[str, Tensor]:
        reference = self.references[name]
        numbered = list(enumerate(key for key in reference.params if key.rpartition("#")[0] == name))
        if isinstance(reference, ReferenceSoap):
            kept = {f"soap_{kind}.{n}": value for n, key in numbered for kind, value in reference.soap[key].items()}
            return {"momentum_buffer": torch.empty(0), **kept}
        kept = {f"second_moment.{n}": reference.moments[key][0] for n, key in numbered if key in reference.moments}
        return {"momentum_buffer": _whole(reference.average, name), **kept}


def _parts(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}#{i}": part for name, value in whole.items() for i, part in enumerate(matrices(name, value))}


def _whole(parts: Mapping[str, Tensor], name: str) -> Tensor:
    return assembled(name, [part for key, part in parts.items() if key.rpartition("#")[0] == name])


@cache
def this_rank() -> dist.ProcessGroup:
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return made[dist.get_rank()]


class OneProcess:
    """Muon on whole plain tensors in one process."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.params = {name: nn.Parameter(drawn(name, 0).to(dtype)) for name in names}
        options = {"lr": LR, "orthogonalize": "reference", **options}
        self.muon = Muon(groups(self.params, other), process_group=this_rank(), **muon_keywords(**options))
        for group in self.muon.param_groups:
            group["initial_lr"] = group["lr"]

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        assert not left_out
        for group in self.muon.param_groups:
            group["lr"] = group["initial_lr"] * RATES[number]
        for name, param in self.params.items():
            param.grad = grads[name].to(self.dtype)
        self.muon.step()

    def weight(self, name: str) -> Tensor:
        return self.params[name].detach()

    def states(self, name: str) -> dict[str, Tensor]:
        return dict(self.muon.state[self.params[name]])


REFERENCES: dict[str, Callable[..., Reference]] = {"torch": TorchMuon, "paper": Papers, "one process": OneProcess}
