"""Figures of docs/results/h200.md and host.md, and the rates of machines, recomputed from docs/results/gpu.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from titan_muon.planner.machine import ERROR, MACHINES

FOLDER = Path(__file__).parents[3] / "docs" / "results"
GPU: dict[str, Any] = {
    part: result["figures"] for part, result in json.loads((FOLDER / "gpu.json").read_text()).items()
}
PAGE = " ".join((FOLDER / "h200.md").read_text(encoding="utf-8").split())
RANKS = ("qwen3_8b", "qwen3_30b_a3b", "kimi_k2")
TRITON = ("momentum", "update")
"""Kernels of `fused`, which the stages of a step do not have."""


def steps(world: str) -> dict[str, dict[str, Any]]:
    return {row["step"]: row for row in GPU[f"rank_{world}"]["rows"]}


def passes(world: str, step: str) -> float:
    """Milliseconds of the passes with all kernels."""
    kernels = GPU[f"rank_{world}"]["details"][step]["kernels"]
    return float(steps(world)[step]["passes ms"] + sum(ms for name, _, ms in kernels if name in TRITON))


def test_the_passes_and_steps_with_fused_are_those_of_all_kernels() -> None:
    pairs = [(passes(world, "plain"), passes(world, "fused")) for world in RANKS]
    shown = re.search(r"passes 2\.4 times \((\S+) to (\S+) ms, (\S+) to (\S+) ms and (\S+) to (\S+) ms", PAGE)
    assert shown is not None
    assert [float(ms) for ms in shown.groups()] == pytest.approx([ms for pair in pairs for ms in pair], rel=0.01)
    assert [before / after for before, after in pairs] == pytest.approx([2.4] * 3, abs=0.08)
    gains = [
        1 - steps(world)[fused]["device ms"] / steps(world)[foreach]["device ms"]
        for world in RANKS
        for foreach, fused in (("plain", "fused"), ("recipe", "recipe, fused"))
    ]
    assert sum(gain > 0 for gain in gains) == 5
    assert "in 5 of 6 pairs: 3, 22, 14 and 23 %" in PAGE
    assert [round(100 * gains[number]) for number in (0, 1, 4, 5, 3)] == [3, 22, 14, 23, 12]


def test_the_host_of_the_planner_is_the_one_that_two_steps_gave() -> None:
    """364 a + 252 b and 1,532 a + 480 b; the third step waits for its kernels."""
    launches, pieces = [steps(world)["plain"]["launches"] for world in RANKS[:2]], (252, 480)
    host = [1e3 * steps(world)["plain"]["host ms"] for world in RANKS[:2]]
    determinant = launches[0] * pieces[1] - launches[1] * pieces[0]
    launch = (host[0] * pieces[1] - host[1] * pieces[0]) / determinant
    piece = (launches[0] * host[1] - launches[1] * host[0]) / determinant
    assert [launch, piece] == pytest.approx([8.6, 26.4], abs=0.05)
    for machine in MACHINES.values():
        assert machine.name == "cpu" or (machine.host, machine.host_piece) == (8.6e-6, 26.4e-6)
    for page in (PAGE, " ".join((FOLDER / "host.md").read_text(encoding="utf-8").split())):
        assert "8.6 us a launch and 26.4 us a piece" in page
    kernels = GPU["rank_kimi_k2"]["details"]["plain"]["kernels"]
    assert f"which take {sum(ms for _, _, ms in kernels):.1f} ms" in PAGE


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


def test_shares_of_large_products_are_of_the_rate_that_the_same_run_measured() -> None:
    figures, shares = GPU["newton_schulz"], dict[int, list[float]]()
    peak = GPU["links"]["machine"]["flops"]["bfloat16"] / 1e12
    for row in figures["rows"]:
        if row["method"] == "standard bfloat16":
            count, *sides = map(int, row["shape"].split(" x "))
            if count != 16:
                shares.setdefault(min(sides), []).append(row["of matmul"] * figures["matmul TFLOP/s"] / peak)
    large = [share for rows, found in shares.items() if rows >= 4096 for share in found]
    rounded = [
        round(100 * share) for share in (min(large), max(large), min(shares[2048]), max(shares[2048]), *shares[768])
    ]
    assert rounded == [82, 85, 74, 76, 59]
    assert "82 to 85 % of the rate of large products (770 TFLOP/s)" in PAGE
    assert "74 to 76 % at 2,048, and 59 % for 128 experts" in PAGE


def table_of(page: str) -> list[list[str]]:
    """The cells of the tables' rows for models on ranks."""
    lines = (FOLDER / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) > 9 and row[1].replace(",", "").isdigit()]


PLANNED = [
    row for file in sorted(FOLDER.glob("plan_*.json")) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
]


def test_plans_are_those_of_the_data() -> None:
    shown = [[*row[:2], row[3].split()[0], row[8].split()[0], row[9]] for row in table_of("plan.md")]
    assert shown == [
        [r["model"], str(r["ranks"]), f"{r['step_ms']:,.1f}", f"{r['host_ms']:,.1f}", str(r["collectives"])]
        for r in PLANNED
    ]


def test_launches_and_the_hosts_time_are_those_of_the_data() -> None:
    """A piece is in 13 lists of a step."""
    machine, expected = MACHINES["h200x8"], []
    for line in (FOLDER / "launches.jsonl").read_text(encoding="utf-8").splitlines():
        count = json.loads(line)
        row = count["row"]
        step = next(planned["step_ms"] for planned in PLANNED if row.items() <= planned.items())
        host = 1e3 * (machine.host * count["launches"] + machine.host_piece / 13 * count["entries"])
        counts = [f"{number:,}" for number in (count["launches"], count["entries"])]
        numbers = [f"{host:.1f}", f"{step:,.1f}", f"{host / step:.2f}"]
        layout = [row["model"], f"{row['ranks']:,}", row["overlap"], str(row["replicas"])]
        expected.append([*layout, count["commit"], str(count["rank"]), *counts, *numbers])
    shown = table_of("host.md")
    assert shown == expected
    shares = [float(row[-1]) for row in shown]
    text = (
        f"more than half of the step in {sum(share > 0.5 for share in shares)} of these {len(shares)} rows, and longer"
    )
    assert f"{text} than the step in {sum(share > 1 for share in shares)}." in (FOLDER / "host.md").read_text()
