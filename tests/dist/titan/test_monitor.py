"""Monitors measure the true values, equal under every layout."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny
from tests.dist.harness import run_ranks
from titan_muon.trainer.torchtitan import compat

compat.install()

from titan_muon.trainer.monitor.monitor import largest_singular_value, orthogonality_error  # noqa: E402

SHORT = {
    "validator__enable": "false",
    "checkpoint__enable": "false",
    "training__steps": 2,
    "muon__expert__ns_dtype": "float32",
    "lr_scheduler__warmup_steps": 0,
}


def monitored(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    from titan_muon.owned import gather
    from titan_muon.trainer.monitor.monitor import Monitor

    measure, exact = Monitor.after_step, {}

    def after_step(self: Monitor, tokens: Any) -> dict[str, Any]:
        record = measure(self, tokens)
        whole = {name: gather(parameter).float() for name, parameter in self._parameters.items()}
        for role in set(self._roles):
            parts = [whole[a.fqn] for a, other in zip(self._whole, self._roles, strict=True) if other == role]
            exact[role] = float(torch.cat([part.flatten() for part in parts]).square().mean().sqrt())
        name = self._sampled[0].name
        exact[name] = float(torch.linalg.matrix_norm(whole[name], 2))
        return record

    shown: dict[str, Any] = {}
    with mock.patch.object(Monitor, "after_step", after_step):
        for placement in ("shard0", "owned"):
            run = tiny.train(tiny.recipe(folder, name=placement, placement__muon=placement, monitor__freq=2, **SHORT))
            ((step, shown[placement]),) = tiny.records(run, "monitor").items()
            assert step == 2
    return {**shown, "exact": exact}


def test_measurements_are_exact_and_equal_under_every_layout(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    shown = run_ranks(monitored, 2, tmp_path)[0]
    record = shown["shard0"]
    assert {"linear", "experts", "embedding", "router", "head"} <= record["weight_rms"].keys()
    for role, value in record["weight_rms"].items():
        assert value == pytest.approx(shown["exact"][role], rel=1e-4)
    for name, value in record["largest_singular_value"].items():
        if name in shown["exact"]:
            assert 0.9 * shown["exact"][name] <= value <= 1.001 * shown["exact"][name]
    assert len(record["largest_singular_value"]) == len(record["orthogonality_error"]) == 2
    assert all(value > 0 for value in record["update_rms"].values())
    assert record["momentum_norm"]["linear"] > 0
    assert record["exposed_communication_ms"] > 0
    assert len(record["tokens_max_over_mean"]) == len(record["experts_without_tokens"]) == 4
    for key in ("weight_rms", "update_rms", "momentum_norm"):
        assert record[key] == pytest.approx(shown["owned"][key], rel=0.05)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (1, 16)])
def test_the_estimated_largest_singular_value_is_a_close_lower_bound(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert 0.97 * exact <= float(largest_singular_value(matrix)) <= exact * (1 + 1e-5)
    assert float(largest_singular_value(torch.zeros(shape))) == 0


def test_only_equal_singular_values_have_zero_orthogonality_error() -> None:
    matrix = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    orthogonal = torch.linalg.qr(matrix).Q
    assert float(orthogonality_error(7 * orthogonal)) < 1e-5
    assert float(orthogonality_error(orthogonal.mT)) < 1e-5
    squares = torch.linalg.svdvals(matrix).square()
    expected = float((squares / squares.mean() - 1).norm() / len(squares) ** 0.5)
    assert float(orthogonality_error(matrix)) == pytest.approx(expected, rel=1e-4)
