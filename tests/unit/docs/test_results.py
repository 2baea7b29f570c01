"""Rates of machines and the error of the clock are those of docs/results/gpu.json, and plan.md shows its data."""

import json
from pathlib import Path
from typing import Any

import pytest

from titan_muon.planner.machine import ERROR, MACHINES

FOLDER = Path(__file__).parents[3] / "docs" / "results"
GPU: dict[str, Any] = {
    part: result["figures"] for part, result in json.loads((FOLDER / "gpu.json").read_text()).items()
}
RANKS = ("qwen3_8b", "qwen3_30b_a3b", "kimi_k2")


def steps(world: str) -> dict[str, dict[str, Any]]:
    return {row["step"]: row for row in GPU[f"rank_{world}"]["rows"]}


def test_the_host_of_the_planner_is_the_one_that_two_steps_gave() -> None:
    """364 a + 252 b and 1,532 a + 480 b; the third step waits for its kernels."""
    launches, pieces = [steps(world)["plain"]["launches"] for world in RANKS[:2]], (252, 480)
    host = [1e3 * steps(world)["plain"]["host ms"] for world in RANKS[:2]]
    determinant = launches[0] * pieces[1] - launches[1] * pieces[0]
    launch = (host[0] * pieces[1] - host[1] * pieces[0]) / determinant
    piece = (launches[0] * host[1] - launches[1] * host[0]) / determinant
    assert [launch, piece] == pytest.approx([8.6, 26.4], abs=0.05)
    for machine in MACHINES.values():
        assert machine.name == "cpu" or (machine.host, 13 * machine.host_entry) == (8.6e-6, 26.4e-6)


def test_the_error_of_the_clock_has_every_measured_step() -> None:
    errors = [row["of model"] for world in RANKS for row in steps(world).values() if "of model" in row]
    assert ERROR[0] <= min(errors) < ERROR[0] + 0.1
    assert ERROR[1] - 0.1 < max(errors) <= ERROR[1]
    assert max(errors) == steps("qwen3_30b_a3b")["recipe"]["of model"]


def test_unmeasured_gpus_have_the_shares_of_the_data_sheet_that_the_h200_reached() -> None:
    sheets = {"h100x8": (989, 3.35), "h200x8": (989, 4.8), "b200x8": (2250, 8.0), "gb200x72": (2500, 8.0)}
    for name, (tflops, memory) in sheets.items():
        reached, machine = MACHINES["h200x8"], MACHINES[name]
        assert machine.flops["bfloat16"] / tflops == pytest.approx(reached.flops["bfloat16"] / 989, rel=0.01)
        assert machine.memory / memory == pytest.approx(reached.memory / 4.8, rel=0.01)


def test_plans_are_those_of_the_data() -> None:
    lines = (FOLDER / "plan.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows, columns = list[dict[str, str]](), list[str]()
    for row in cells:
        if row[0] == "model":
            columns = [column.partition(" =")[0] for column in row]
        elif "calls" in columns and row[1].isdigit():
            rows.append(dict(zip(columns, row, strict=True)))
    planned = [row for file in sorted(FOLDER.glob("plan_*.json")) for row in json.loads(file.read_text())["rows"]]
    shown = ("step", "host", "calls")
    assert [[row["model"], row["ranks"], *(row[name].split()[0] for name in shown)] for row in rows] == [
        [r["model"], str(r["ranks"]), f"{r['step_ms']:,.1f}", f"{r['host_ms']:,.1f}", str(r["collectives"])]
        for r in planned
    ]
