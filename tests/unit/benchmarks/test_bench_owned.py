"""benchmarks/bench_owned.py on two ranks and a tiny model: table, file, and a step without traffic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_measures_owned_and_sharded(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--nproc", "2", "--dim", "32", "--blocks", "2", "--repeats", "1")
    command = [sys.executable, str(BENCHMARKS / "bench_owned.py"), *sizes, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert {key: figures[key] for key in ("nproc", "dim", "blocks")} == {"nproc": 2, "dim": 32, "blocks": 2}
    sent = {row["name"]: row["step"] for row in figures["rows"]}
    assert sent["owned"] == 0 < sent["sharded"]
    assert all(f"| {name} |" in done.stdout for name in [*sent, "ratio"])
