"""Every command in a process of its own, as a user starts it: exit code and last line."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[3]
PYTHON = shlex.quote(sys.executable)
SMALL = "--training.steps 2 --lr_scheduler.total_steps 2 --checkpoint.freq 1 --validator.freq 2 --validator.steps 1"
TITAN = f"{PYTHON} -m titan_muon.command"
TRAINED = r"next: titan-muon (sample (\S+)); titan-muon (evaluate \S+)"
DRY_RUN = "--config {recipe} --world-size 2"
COMMANDS: dict[str, str] = {
    f"{PYTHON} train.py --config {{recipe}} --dry-run --world-size 2": r".*\S",
    f"{TITAN} train --config {{recipe}} {SMALL} --name again": TRAINED,
    f"{TITAN} plan {DRY_RUN}": r".*\S",
    f"{TITAN} compare {{run}} {{run2}} --output {{out}}/c.png": r"Picture: .*c\.png",
    f"{TITAN} sweep {{recipe}} muon.lr=1e-3 {SMALL} --dump_folder {{out}}/runs": r".*\S",
    f"{PYTHON} scripts/sweep.py {{recipe}} muon.lr=1e-3,2e-3 --dry-run": r"2 runs of 1 process\(es\) each",
    f"{PYTHON} scripts/compare_runs.py {{run}} {{run2}} --output {{out}}/d.png": r"Picture: .*d\.png",
    f"{PYTHON} scripts/sample.py {{run}} --tokens 3": r"(?s).*",
    f"{PYTHON} scripts/evaluate.py {{run}} --sequences 1": r"step 2: .* tokens of 1 of \d+ sequences; --.*",
    # The last line of a training, as written.
    f"{TITAN} {{sample}}": r"(?s).*",
    f"{TITAN} {{evaluate}}": r"(?s).*",
    f"{PYTHON} scripts/export.py {{run}} {{out}}/exported --drop-expert-bias": r"step 2 of .* is in .*exported",
    # Each needs more than ten seconds for its smallest case.
    f"{PYTHON} -m benchmarks.plan_scale --help": r".*\S",
    f"{PYTHON} benchmarks/bench_step.py --help": r".*\S",
    f"{PYTHON} benchmarks/bench_owned.py --help": r".*\S",
    f"{PYTHON} benchmarks/bench_orthogonalize.py --help": r".*\S",
    f"{PYTHON} benchmarks/count_launches.py --help": r".*\S",
    f"{PYTHON} benchmarks/compile_kernels.py --help": r".*\S",
    f"{PYTHON} benchmarks/host_cost.py --help": r".*\S",
    f"{PYTHON} -m benchmarks.step_counts --help": r".*\S",
    f"{PYTHON} -m benchmarks.stages --help": r".*\S",
    f"{PYTHON} -m benchmarks.exchanges --help": r".*\S",
}
"""Last line of the output by command."""


def start(command: str) -> tuple[int, list[str], str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout.rstrip().split("\n"), done.stderr


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The recipe, the folders of two runs, and the commands of the last line."""
    folder = tmp_path_factory.mktemp("commands")
    recipe = tiny.write_recipe(folder)
    places = {"recipe": str(recipe), "out": str(folder)}
    for name, more in (("run", ""), ("run2", "--muon.lr 1e-3")):
        code, lines, errors = start(f"{PYTHON} train.py --config {recipe} {SMALL} {more}")
        assert code == 0, errors
        ended = re.fullmatch(TRAINED, lines[-1])
        assert ended is not None, lines[-1]
        places |= {name: ended[2], "sample": ended[1], "evaluate": ended[3]}
    return places


def test_the_table_has_every_command() -> None:
    known = "\n".join(COMMANDS)
    for file in [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]:
        if "__main__" in file.read_text():
            assert f"{file.parent.name}/{file.name}" in known or f"-m benchmarks.{file.stem}" in known, file


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words.split()[1:4]))
def test_a_command_ends_as_a_user_expects(command: str, trained: dict[str, str]) -> None:
    if "compile_kernels" in command and find_spec("triton") is None:
        pytest.skip("compile_kernels.py needs Triton, which is not installed")
    code, lines, errors = start(command.format(**trained))
    assert code == 0, errors
    assert "Traceback" not in errors
    assert re.fullmatch(COMMANDS[command], lines[-1]), lines
