"""References of rows: torch.optim.Muon, the algorithms from their papers, or Muon itself, in one process."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.layouts import assembled, drawn, matrices
from tests.reference_muon import ReferenceMuon
from tests.reference_soap import ReferenceSoap
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


class Reference(Protocol):
    """Trains whole parameters. `left_out`: matrices without an update, by name of the parameter and number."""

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None: ...

    def weight(self, name: str) -> Tensor: ...

    def states(self, name: str) -> dict[str, Tensor]: ...


def in_groups(names: list[str], other: Options) -> Iterator[tuple[list[str], Options]]:
    """Names by group, and the hyperparameters of the group. Every other parameter is in the second one, if any."""
    yield (names[::2] if other else names), {}
    if other:
        yield names[1::2], other


def groups(pairs: Mapping[str, Any], other: Options) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer."""
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


class Algorithm:
    """The definition of an algorithm or option in `tests/reference_muon.py`, on each matrix."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        assert not other
        options = {name: value for name, value in options.items() if name != "soap_freq"}
        self.counts = {name: len(matrices(name, drawn(name, 0))) for name in names}
        parts = self._parts({name: drawn(name, 0) for name in names})
        self.reference = ReferenceMuon(parts, dtype=dtype, **({"lr": LR} | options))
        self.lr = self.reference.lr

    @staticmethod
    def _parts(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}#{i}": part for name, value in whole.items() for i, part in enumerate(matrices(name, value))}

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        self.reference.lr = self.lr * RATES[number]
        without = {f"{name}#{index}" for name, index in left_out}
        self.reference.step({key: grad for key, grad in self._parts(grads).items() if key not in without})

    def weight(self, name: str) -> Tensor:
        return self._whole(self.reference.params, name)

    def states(self, name: str) -> dict[str, Tensor]:
        moments = self.reference.moments
        kept = {
            f"second_moment.{number}": moments[f"{name}#{number}"][0]
            for number in range(self.counts[name])
            if f"{name}#{number}" in moments
        }
        return {"momentum_buffer": self._whole(self.reference.average, name), **kept}

    def _whole(self, parts: Mapping[str, Tensor], name: str) -> Tensor:
        return assembled(name, [parts[f"{name}#{number}"] for number in range(self.counts[name])])


class Soap(Algorithm):
    """SOAP of `tests/reference_soap.py`, on each matrix."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        assert not other
        self.counts = {name: len(matrices(name, drawn(name, 0))) for name in names}
        given = {name: value for name, value in options.items() if name != ALGORITHM}
        self.soap = ReferenceSoap(self._parts({name: drawn(name, 0) for name in names}), **({"lr": LR} | given))
        self.reference, self.lr = self.soap, self.soap.lr

    def states(self, name: str) -> dict[str, Tensor]:
        kept = {
            f"soap_{key}.{number}": value
            for number in range(self.counts[name])
            for key, value in self.soap.soap[f"{name}#{number}"].items()
        }
        return {"momentum_buffer": torch.empty(0), **kept}


class ByGroup:
    """An algorithm for each group, each in its own reference."""

    def __init__(self, names: list[str], options: Options, other: Options, dtype: torch.dtype) -> None:
        self.parts = dict[str, Reference]()
        for part, more in in_groups(names, other):
            own = {**options, **more}
            made = Soap(part, own, {}, dtype) if own.get(ALGORITHM) == "soap" else Algorithm(part, own, {}, dtype)
            self.parts |= dict.fromkeys(part, made)

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        for part in {*self.parts.values()}:
            part.step(number, {name: grad for name, grad in grads.items() if self.parts[name] is part}, left_out)

    def weight(self, name: str) -> Tensor:
        return self.parts[name].weight(name)

    def states(self, name: str) -> dict[str, Tensor]:
        return self.parts[name].states(name)


@cache
def this_rank() -> dist.ProcessGroup:
    """A process group of this rank alone."""
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


REFERENCES: dict[str, Callable[..., Reference]] = {
    "torch": TorchMuon,
    "paper": Algorithm,
    "soap": Soap,
    "groups": ByGroup,
    "one process": OneProcess,
}
