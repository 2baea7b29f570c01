"""States of algorithms: on the owner of a matrix alone, without a collective for owned matrices."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.parity.references import ALGORITHM
from tests.parity.table import ELEMENTS_SMOOTHED, NORMUON_AND_SOAP, ROWS_SMOOTHED, SPHERE, row
from tests.parity.training import Training
from tests.shared import local, message, muon_keywords
from titan_muon import Expert, Muon

SHAPES = ("wide", "tall", "uneven", "experts")
MATRICES = 3 + 8
ALGORITHMS: dict[str, dict[str, Any]] = {"normuon": ROWS_SMOOTHED, "adamuon": ELEMENTS_SMOOTHED, "muonh": SPHERE}


def made(world_size: int, layout: str, math: dict[str, Any], **options: Any) -> Training:
    return Training(row("states", world_size, (layout,), shapes=SHAPES, math=math, options=options))


def states(training: Training, key: str = "") -> dict[str, Tensor]:
    """This rank's states by parameter and key."""
    return {
        f"{name.rpartition('.')[2]}.{kind}": local(value)
        for name, param in training.params.items()
        for kind, value in training.muon.state[param].items()
        if key in kind and local(value).numel()
    }


def place(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """By layout and algorithm: second moments on this rank, and collectives of the last step."""
    results = {}
    for layout in ("owned", "plain"):
        for name, options in ALGORITHMS.items():
            training = made(world_size, layout, options)
            training.step_on(1)
            calls = training.muon.exchange.collectives.traffic.calls
            training.step_on(2)
            calls = training.muon.exchange.collectives.traffic.calls - calls
            results[f"{layout} {name}"] = len(states(training, "second_moment")), calls
    return results


def resume(world_size: int, layout: str) -> tuple[bool, bool, str]:
    """Whether second moments are loaded in place, whether a refused load changes any state, and the refusal."""
    training = made(world_size, layout, ROWS_SMOOTHED)
    training.step_on(1)
    kept = copy.deepcopy(training.muon.state_dict())
    storage = [moment.data_ptr() for moment in states(training, "second_moment").values()]
    training.muon.load_state_dict(kept)
    in_place = storage == [moment.data_ptr() for moment in states(training, "second_moment").values()]
    plain = made(world_size, layout, {})
    plain.step_on(1)
    before = {name: state.clone() for name, state in states(training).items()}
    refused = message(lambda: training.muon.load_state_dict(plain.muon.state_dict()))
    same = all(torch.equal(before[name], state) for name, state in states(training).items())
    return in_place, same, refused


def read_elsewhere(world_size: int) -> list[str]:
    """The errors of reading whole second moments on a rank without the moments."""
    training = made(world_size, "fsdp", ROWS_SMOOTHED)
    moments = [training.muon.build().state[param]["second_moment.0"] for param in training.params.values()]
    return [message(moment.full_tensor) for moment in moments if not local(moment).numel()]


def widths(world_size: int) -> tuple[set[int], str]:
    """Bytes of an element in each bucket beside SOAP, and the reason."""
    plan = Training(row("widths", world_size, ("fsdp",), **NORMUON_AND_SOAP)).muon.plan
    return {plan.wire_bytes(bucket) for bucket in plan.buckets}, plan.reason


def stages(rank: int, world_size: int) -> list[str]:
    """The errors of pipeline stages of one rank, with SOAP on rank 0 alone, and on no rank."""
    mesh, matrix = DeviceMesh("cpu", [rank]), torch.ones(16, 24)
    params = [(f"{rank}.w", torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)))]
    groups = [[{"params": params, "algorithm": name}] for name in ("muon" if rank else "soap", "muon")]
    return [message(Muon(group, expert=Expert(soap_freq=5)).build) for group in groups]


def on_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    loaded = {layout: resume(world_size, layout) for layout in ("fsdp", "owned", "plain")}
    return place(rank, world_size), loaded, read_elsewhere(world_size), widths(world_size), stages(rank, world_size)


def test_the_states_of_an_algorithm_are_on_the_owner_alone() -> None:
    places, loads, reads, wires, of_stages = zip(*run_ranks(on_ranks, 2, timeout=2 * SECONDS), strict=True)
    for key in places[0]:
        assert sum(result[key][0] for result in places) == (0 if key.endswith("muonh") else MATRICES), key
        assert key.startswith("plain") or all(result[key][1] == 0 for result in places), (
            "owned matrices need no exchange"
        )
    for result in loads:
        for in_place, same, refused in result.values():
            assert in_place
            assert same, "it is refused before anything is loaded"
            assert "wide: the state dict has no second_moment.0" in refused
    for texts in reads:
        assert texts
        assert all("load the state with torch.distributed.checkpoint" in text for text in texts)
    for sizes, reason in wires:
        assert sizes == {2, 4}
        assert "travel in float32, because their algorithm needs this" in reason
    for used, unused in of_stages:
        assert not used, "an option of an algorithm of another stage is in use"
        assert "soap_freq = 5 has no effect without algorithm = 'soap'" in unused


def test_a_matrix_of_zeros_under_muonh_is_an_error_after_the_step() -> None:
    """The norm would stay 0."""
    param = torch.nn.Parameter(torch.zeros(16, 24))
    param.grad = torch.ones(16, 24)
    muon = Muon([("w", param)], **muon_keywords(**{ALGORITHM: "muonh", "weight_decay": 0.0}))
    muon.step()
    assert "w: a matrix of zeros, which keeps the norm 0" in message(muon.check_last_step)
