"""Chains of checkpoints: each stage continues the checkpoint of another world and layout, as one process would."""

from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.parity.references import ALGORITHM
from tests.parity.table import KEPT, NORMUON_AND_SOAP, SOAP, in_hops
from tests.parity.training import Row, Training, gradients, reference_of
from titan_muon.engine.tensors.dtensor import copy_rows

ON_HOST = {"offload": "state"}
Stage = tuple[int, str | tuple[str, ...], dict[str, Any]]
"""Ranks, a layout or several in one Muon, and options of Muon."""


@dataclass(frozen=True)
class Chain:
    """A claim: training over the stages, a step in each, has the bits of the reference of `row`.

    `titan`: TorchTitan's functions save and load the optimizer.
    """

    row: Row
    stages: tuple[Stage, ...]
    titan: bool = False

    def __str__(self) -> str:
        return self.row.name


def chains() -> list[Chain]:
    shards: tuple[Stage, ...] = ((4, "fsdp", in_hops(2)), (2, "plain", {}), (1, "plain", {}), (4, "hsdp", {}))
    homes: tuple[Stage, ...] = ((4, "owned", {}), (2, "fsdp", {}), (1, "plain", {}), (4, "fsdp x tp rows", {}))
    replicas: tuple[Stage, ...] = ((4, "owned, hsdp", {}), (2, "fsdp", {}), (4, "owned, hsdp", {}))
    keepers: tuple[Stage, ...] = ((4, "plain", KEPT), (2, "replicated", {}), (4, "hsdp", KEPT), (2, "plain", KEPT))
    hosts: tuple[Stage, ...] = ((4, "hsdp", ON_HOST), (2, "fsdp", {}), (4, "fsdp", {"offload": "parameters"}))
    ranges: tuple[Stage, ...] = ((4, "ranges", {}), (2, "fsdp", {}), (4, "ranges, hfsdp", {}), (1, "plain", {}))
    rows: tuple[Stage, ...] = ((4, "hsdp", {}), (2, "fsdp", {}), (1, "plain", {}), (4, "fsdp x tp rows", {}))
    meshes: tuple[Stage, ...] = (
        (4, ("fsdp", "fsdp x tp rows"), {}),
        (2, ("plain", "tp columns"), {}),
        (4, ("first ranks", "every other"), {}),
    )
    return [
        chain("from shards to replicas", shards),
        chain("several meshes", meshes),
        chain("several meshes by TorchTitan", meshes[:2], titan=True),
        chain("from owned to tensor parallelism", homes),
        chain("owned again", homes[::-1]),
        chain("owned in replicas", replicas),
        chain("from owners to replicas", keepers),
        chain("from the host to the device", hosts),
        chain("any rows", ranges),
        chain("any rows again", ranges[::-1], math={ALGORITHM: "normuon", "beta2": 0.9}),
        chain("by TorchTitan", shards, titan=True),
        chain("owners by TorchTitan", keepers, titan=True),
        chain("normuon", shards, math={ALGORITHM: "normuon", "beta2": 0.9}),
        chain("normuon from owned", homes, math={ALGORITHM: "normuon", "beta2": 0.9}),
        chain("normuon by TorchTitan", homes, titan=True, math={ALGORITHM: "normuon", "beta2": 0.9}),
        chain("adamuon by TorchTitan", homes, titan=True, math={ALGORITHM: "adamuon", "beta2": 0.9}),
        chain("adamuon", shards, math={ALGORITHM: "adamuon", "beta2": 0.9}),
        chain("soap", (*rows[:3], (4, "ep x rows", {})), **SOAP),
        chain("soap by TorchTitan", homes, titan=True, **SOAP),
        chain("normuon and soap", rows, **NORMUON_AND_SOAP),
        chain("normuon and soap by TorchTitan", homes, titan=True, **NORMUON_AND_SOAP),
        chain("muonh", homes, math={ALGORITHM: "muonh", "weight_decay": 0.0}, close=1e-4),
        chain("warm-up", shards, math={"momentum_warmup_steps": 3}),
        chain("int8 momentum", rows, math={"state_dtype": "int8"}, reference="one process", close=0.2),
        chain("int8 momentum, any rows", ranges, math={"state_dtype": "int8"}, reference="one process", close=0.2),
        chain("bfloat16 momentum", shards, math={"state_dtype": "bfloat16"}, reference="one process"),
    ]


def chain(name: str, stages: tuple[Stage, ...], titan: bool = False, **row: Any) -> Chain:
    default = {"shapes": ("wide", "tall", "uneven", "short", "experts", "few")}
    default["reference"] = "paper" if "math" in row else "torch"
    return Chain(Row(f"checkpoints: {name}", 0, (), **(default | row)), stages, titan)


def continued(rank: int, world_size: int, row: Row, titan: bool, number: int, source: str, target: str) -> list[str]:
    """One stage: load a checkpoint if `source` is one, step, save. Differences from the reference."""
    training = Training(row)
    names = list(training.params)
    if number:
        # Other weights and states, so that a missing load is noticed.
        training.step(0, gradients(training, 90)[0], set())
        state = saved(training, titan)
        dcp.load(state, checkpoint_id=source)
        load(training, titan, state)
    reference = reference_of(row, names)
    for step in range(number + 1):
        grads = gradients(training, step)[0]
        if step == number:
            training.step(step, grads, set())
        reference.step(step, grads, set())
    dcp.save(saved(training, titan), checkpoint_id=target)
    different = training.differences(reference, set())
    training.muon.close()
    return different


def saved(training: Training, titan: bool) -> dict[str, Any]:
    if titan:
        # Not at the top, because torchtitan needs `compat.install` first.
        from torchtitan.components.optimizer.utils import get_flat_optim_state_dict

        states = get_flat_optim_state_dict(training.muon)
    else:
        states = get_optimizer_state_dict(training.model, training.muon)
    weights = training.model.state_dict()
    for name, param in training.params.items():
        copy_rows(param, weights[name])
    return {"model": weights, "optimizer": states}


def load(training: Training, titan: bool, state: dict[str, Any]) -> None:
    if titan:
        from torchtitan.components.optimizer.utils import load_flat_optim_state_dict

        load_flat_optim_state_dict(training.muon, state["optimizer"])
    else:
        set_optimizer_state_dict(training.model, training.muon, state["optimizer"])
