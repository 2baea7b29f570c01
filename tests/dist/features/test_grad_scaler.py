"""Muon under torch.amp.GradScaler: a step skipped on a single rank is an error."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, named, parameters
from tests.shared import equal
from titan_muon import Muon


def contents(params: dict[str, Parameter], muon: Muon) -> list[torch.Tensor]:
    """Copies of this rank's weights and states."""
    averages = [muon.state[param]["momentum_buffer"] for param in params.values()]
    return [tensor.to_local().detach().clone() for tensor in (*params.values(), *averages)]  # type: ignore[attr-defined]


def skip_on_one_rank(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether a step skipped by rank 1 changed anything here, and the error."""
    params = parameters(init_device_mesh("cpu", (world_size,)))
    muon = Muon(named(params)).build()
    before = contents(params, muon)
    # Like a scaler with this rank's gradients only; over DTensors, GradScaler reduces its result.
    muon.grad_scale, muon.found_inf = None, torch.tensor([float(rank == 1)])  # type: ignore[attr-defined]
    muon.step()
    del muon.grad_scale, muon.found_inf  # type: ignore[attr-defined]
    changed = not equal(before, contents(params, muon))
    try:
        muon.step()
    except ValueError as error:
        return changed, str(error)
    return changed, ""


def test_a_step_skipped_on_a_single_rank_is_an_error_on_every_rank_in_the_next_step() -> None:
    results = run_ranks(skip_on_one_rank, 2, timeout=SECONDS)
    assert [changed for changed, _ in results] == [True, False]
    assert all("only some ranks skipped a step" in message for _, message in results)
