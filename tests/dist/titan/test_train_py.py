"""Commands for a user: exit codes, last lines, one line for a mistake, requested ends, and a restart after a kill."""

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import tiny
from tests.dist.harness import run_program

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def start(launcher: Sequence[str], file: Path, *words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [*launcher, "train.py", "--config", str(file), *words]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=stdout, stderr=subprocess.STDOUT)


def worker(launcher: subprocess.Popen[str], local_rank: int) -> int:
    shown = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    return sorted(int(pid) for pid in shown.split())[local_rank]


def run_folder(folder: Path) -> Path:
    runs = folder / "runs" / "tiny"
    return runs / (runs / "latest").read_text().strip()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if re.search(pattern, line):
            return before
    raise AssertionError(f"no line has {pattern!r}:\n{before}")


KEYS = ("training.steps", "lr_scheduler.total_steps", "validator.freq", "checkpoint.freq")
LONG = tuple(f"--{key}=5000" for key in KEYS)


def test_sigterm_stops_every_rank_at_the_same_step_with_a_complete_checkpoint(tmp_path: Path) -> None:
    """SIGTERM arrives at different times on the workers. The exit code is 0."""
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *LONG)
    read_until(process, r"^step +1/")
    os.kill(worker(process, 1), signal.SIGTERM)
    shown = process.communicate(timeout=300)[0]
    assert process.returncode == 0, shown
    assert "Traceback" not in shown
    (step,) = (run_folder(tmp_path) / "checkpoint").iterdir()
    last = f"stopped after step {step.name.removeprefix('step-')} of 5000: saved; "
    assert shown.splitlines()[-1] == f"{last}the same command with --checkpoint.load latest continues"
    assert (step / ".metadata").is_file()


def test_ctrl_c_without_checkpoints_names_the_lost_work(tmp_path: Path) -> None:
    """Ctrl-C of one process without torchrun exits with 0."""
    process = start((sys.executable,), tiny.write_recipe(tmp_path), *LONG, "--checkpoint.enable=false")
    read_until(process, r"^step +1/")
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=300)[0]
    assert process.returncode == 0, shown
    assert "nothing is saved (checkpoint.enable = false)" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--training.stepz=3", "training.steps"),
        ("--checkpoint.load=no/such/folder", "no such folder"),
        ("--data.files=no/such/*.txt", "error: command line: data.files"),
    ],
)
def test_a_mistake_prints_a_single_line_and_exits_with_2(words: str, expected: str, tmp_path: Path) -> None:
    code, shown = run_program("train.py", "--config", str(tiny.write_recipe(tmp_path)), words)
    assert code == 2, shown
    errors = [line for line in shown.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert expected in errors[0]
    assert "Traceback" not in shown
    assert not [path for path in tmp_path.glob("runs/*") if path.is_dir()], "a run that never began leaves no folder"


def test_a_diverged_model_is_never_saved(tmp_path: Path) -> None:
    """Between two reports of the loss, no step with such weights is saved."""
    often = ("--metrics.log_freq=9", "--checkpoint.enable=true", "--checkpoint.freq=1", "--training.steps=6")
    words = ("--adamw.lr=1e30", *often, "--validator.enable=false", "--lr_scheduler.warmup_steps=0")
    code, shown = run_program("train.py", "--config", str(tiny.write_recipe(tmp_path)), *words)
    assert code == 1, shown
    assert shown.count("error: ") == 1
    assert "Traceback" not in shown
    (reason,) = tiny.records(run_folder(tmp_path), "diverged").values()
    assert str(reason) in shown, "one record, and one error in the same words"
    assert re.search(r"weights are not finite or larger than 1e\+06.*Lower the learning rates", shown)
    assert "documents of data.files with " in shown, "each start says what it reads"
    assert not list((run_folder(tmp_path) / "checkpoint").glob("step-*"))


DIVERGES = ("--adamw.lr=1e30", "--lr_scheduler.warmup_steps=0", "--metrics.log_freq=9", "--validator.freq=1")


@pytest.mark.parametrize(
    ("words", "expected", "code"),
    [
        (("--training.seq_len=60000",), "training.seq_len = 60000 exceeds the 40960 positions", 2),
        (DIVERGES, "the norm of the gradients is nan", 1),
    ],
)
def test_the_end_of_two_ranks_is_printed_once(words: tuple[str, ...], expected: str, code: int, tmp_path: Path) -> None:
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *words)
    shown = process.communicate(timeout=240)[0]
    assert process.returncode != 0
    assert shown.count("error: ") == 1, shown
    assert expected in shown
    assert f"exitcode  : {code} " in shown
    assert "RecipeError" not in shown
    runs = [path for path in (tmp_path / "runs" / "tiny").glob("2*") if path.is_dir()]
    assert len(runs) == (code == 1), "a refused run leaves no folder"
    if code == 1:
        assert next(iter(tiny.records(runs[0], "diverged").values())) in shown


# Killed and stopped ranks

# Bfloat16 products are slow on many CPUs.
FEW = ("--training.steps=6", "--validator.enable=false", "--checkpoint.freq=2", "--muon.expert.ns_dtype=float32")


def start_nodes(file: Path, *words: str) -> tuple[subprocess.Popen[str], ...]:
    """Two nodes with a rank on each; the second has the output of both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    node = (*TORCHRUN[:3], "--nproc_per_node=1", "--nnodes=2", "--rdzv-backend=c10d", meeting, "--rdzv-id=job")
    reader, writer = os.pipe()
    first, second = (start([*node, "--max-restarts=9"], file, *words, stdout=writer) for _ in range(2))
    os.close(writer)
    second.stdout = os.fdopen(reader)
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_a_run_with_kills_at_random_moments_has_the_digits_of_an_undisturbed_run(tmp_path: Path, nodes: int) -> None:
    """A random rank is killed with kill -9 once, and once more for each 250 steps. `make soak` trains 2,000 steps.

    A dense model, because the expert counts of a batch change its losses in the last digits.
    """
    steps, draw = int(os.environ.get("TITAN_MUON_SOAK_STEPS", "6")), random.Random(0)
    kills = sorted(draw.sample(range(2, steps - 1), max(1, steps // 250)))
    recipe = tiny.write_recipe(tmp_path)
    words = (*FEW, "--model.name=llama3", "--model.flavor=tiny", f"--training.steps={steps}")
    words = (*words, f"--lr_scheduler.total_steps={steps}")
    losses = []
    for due in ([], kills):
        named = (*words, f"--name=kills{len(due)}")
        single = (*TORCHRUN, f"--max-restarts={len(due)}")
        launchers = start_nodes(recipe, *named) if due and nodes == 2 else (start(single, recipe, *named),)
        shown = ""
        for step in due:
            shown += read_until(launchers[-1], rf"^step +{step}/")
            rank = draw.randrange(2)
            os.kill(worker(launchers[rank % len(launchers)], -1 if nodes == 2 else rank), signal.SIGKILL)
            shown += f"killed rank {rank}\n"
        shown += launchers[-1].stdout.read()  # type: ignore[union-attr]
        assert [launcher.wait(timeout=300) for launcher in launchers] == [0] * len(launchers), shown
        (folder,) = (path.parent for path in tmp_path.glob(f"runs/kills{len(due)}/*/metrics.jsonl"))
        losses.append(tiny.records(folder, "loss"))
    assert list(losses[0]) == list(range(1, steps + 1))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_job_with_a_stopped_rank_ends_and_names_it_once(tmp_path: Path) -> None:
    """torchrun waits for 30 s for a process in SIGSTOP."""
    words = ("--validator.enable=false", "--comm.train_timeout_seconds=5", "--training.steps=500")
    words += ("--lr_scheduler.total_steps=500", "--muon.expert.ns_dtype=float32")
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *words)
    shown = read_until(process, r"^step +2/")
    stopped = worker(process, 1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        shown += process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    (line,) = [line for line in shown.splitlines() if "gives no sign of life" in line]
    assert f"rank 1 (process {stopped} on " in line


# Every command in a process of its own, as a user starts it: exit code and last line

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


def output_of(command: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout.rstrip().split("\n"), done.stderr


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The recipe, the folders of two runs, and the commands of the last line."""
    folder = tmp_path_factory.mktemp("commands")
    recipe = tiny.write_recipe(folder)
    places = {"recipe": str(recipe), "out": str(folder)}
    for name, more in (("run", ""), ("run2", "--muon.lr 1e-3")):
        code, lines, errors = output_of(f"{PYTHON} train.py --config {recipe} {SMALL} {more}")
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
    code, lines, errors = output_of(command.format(**trained))
    assert code == 0, errors
    assert "Traceback" not in errors
    assert re.fullmatch(COMMANDS[command], lines[-1]), lines
