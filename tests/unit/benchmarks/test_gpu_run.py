"""`make gpu`: parts run in turn despite failures, and continue after an interruption; bad input."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.gpu import environment as environments
from benchmarks.gpu import report, results, run
from benchmarks.gpu.environment import Environment
from benchmarks.gpu.parts import CALLS, PARTS, Part
from benchmarks.gpu.results import Outcome, Result

ONE_GPU = Environment(("GPU X",), "2.15.0", "13.2", "600.1", "3.11.0", "abc123", ("tyro", "pytest"))
NO_GPU = replace(ONE_GPU, gpus=())
WRITES = "import json,sys; json.dump({'rows': [{'name': 'a', 'ms': 1.5}]}, open(sys.argv[1], 'w')); print('done')"


def part(name: str, code: str = WRITES, **values: object) -> Part:
    command = ("{python}", "-c", code, "{json}")
    return Part(
        **{
            "name": name,
            "shows": f"what {name} shows",
            "command": command,
            "rehearsal": command,
            "seconds": 20,
            **values,
        }
    )  # type: ignore[arg-type]


def counting(name: str, folder: Path) -> Part:
    """A part that appends a line to a file in each run."""
    return part(name, f"open({str(folder / 'ran')!r}, 'a').write('{name} ')")


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split()


def go(folder: Path, *selected: Part, environment: Environment | None = ONE_GPU, words: tuple[str, ...] = ()) -> int:
    return run.main(["--out", str(folder), *words], selected, environment)


def outcome(folder: Path, name: str) -> Result:
    return results.read(folder / results.FILE)[name]


def test_a_second_run_skips_passed_parts(tmp_path: Path) -> None:
    both = counting("a", tmp_path), counting("b", tmp_path)
    assert go(tmp_path, *both, words=("--parts", "a")) == 0
    assert go(tmp_path, *both) == 0
    assert ran(tmp_path) == ["a", "b"]
    assert go(tmp_path, *both, words=("--again", "--parts", "b")) == 0
    assert ran(tmp_path) == ["a", "b", "b"]


@pytest.mark.parametrize(
    "other", [{"gpus": ("GPU Y",)}, {"gpus": ("GPU X", "GPU X")}, {"torch": "2.16.0"}, {"commit": "abc124"}], ids=str
)
def test_parts_passed_on_another_machine_run_again(tmp_path: Path, other: dict[str, object]) -> None:
    counter = counting("a", tmp_path)
    go(tmp_path, counter)
    go(tmp_path, counter, environment=replace(ONE_GPU, **other))  # type: ignore[arg-type]
    assert ran(tmp_path) == ["a", "a"]


def test_an_unknown_commit_skips_no_part_and_writes_the_report(tmp_path: Path) -> None:
    counter, unknown = counting("a", tmp_path), replace(ONE_GPU, commit="")
    go(tmp_path, counter, environment=unknown)
    go(tmp_path, counter, environment=unknown)
    assert ran(tmp_path) == ["a", "a"]
    assert outcome(tmp_path, "a").outcome is Outcome.PASSED


def test_a_failed_part_stops_no_later_part_and_sets_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    failing = part("bad", "print('what went wrong'); raise SystemExit(3)")
    assert go(tmp_path, failing, part("good")) == 1
    assert outcome(tmp_path, "bad").outcome is Outcome.FAILED
    assert "exit code 3" in outcome(tmp_path, "bad").reason
    assert outcome(tmp_path, "good").outcome is Outcome.PASSED
    printed = capsys.readouterr().out
    assert "what went wrong" in printed
    assert "[2/2] good" in printed


def test_failed_parts_run_again_without_old_figures(tmp_path: Path) -> None:
    assert go(tmp_path, part("a")) == 0
    assert go(tmp_path, part("a", "raise SystemExit(1)"), words=("--again",)) == 1
    assert outcome(tmp_path, "a").figures is None
    assert go(tmp_path, part("a")) == 0
    assert outcome(tmp_path, "a").figures == {"rows": [{"name": "a", "ms": 1.5}]}


SLEEPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({file!r}, "w").write(str(child.pid))
child.wait()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_part_over_the_time_limit_is_named_and_killed_with_the_children(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    child = tmp_path / "child"
    slow = part("slow", SLEEPS.format(file=str(child)), seconds=2)
    assert go(tmp_path, slow, part("good")) == 1
    assert outcome(tmp_path, "slow").outcome is Outcome.OUT_OF_TIME
    assert "slow  out of time: did not end in 2 s" in capsys.readouterr().out
    assert outcome(tmp_path, "good").outcome is Outcome.PASSED
    assert gone(int(child.read_text()))


FILES = ["machine.json", "measured.json", "report.md", "results.json", "results.tgz"]


def test_the_files_are_renewed_after_each_part_and_the_archive_has_every_log(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    seen = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sorted(os.listdir({str(folder)!r}))))"
    go(folder, part("parity"), part("float16", seen), part("links", "raise SystemExit(1)"))
    assert (tmp_path / "seen").read_text().split() == FILES, "complete before the second part"
    assert sorted(file.name for file in folder.iterdir()) == FILES
    with tarfile.open(folder / report.ARCHIVE) as archive:
        logs = [f"{name}.log" for name in ("float16", "links", "parity")]
        assert sorted(archive.getnames()) == sorted([*logs, "parity.figures", "report.md", "results.json"])
    page = (folder / report.PAGE).read_text()
    assert "| parity | 1 | passed |" in page
    assert "| links | 1 | failed exit code 1, see links.log in results.tgz |" in page
    assert "| sweep | 2 | not run |" in page
    assert "| a | 1.5 |" in page


def test_a_call_ends_at_its_limit_and_names_the_parts_without_time(tmp_path: Path) -> None:
    slow = part("slow", "import time; time.sleep(60)", call=1, seconds=100)
    begin = time.monotonic()
    assert go(tmp_path, slow, part("late", call=1), part("other", call=2), words=("--call", "1", "--limit", "6")) == 1
    assert time.monotonic() - begin < 15
    kept = results.read(tmp_path / results.FILE)
    assert kept["slow"].outcome is Outcome.OUT_OF_TIME
    assert (kept["late"].outcome, kept["late"].reason) == (Outcome.NOT_RUN, "no time left in this call")
    assert list(kept) == ["slow", "late"]


def test_a_part_learns_its_time_and_the_best_rates_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUON", raising=False)
    monkeypatch.setenv("ADAMW", "7e-4")
    rows = [{"optimizer": "muon", "lr": lr, "loss": loss} for lr, loss in ((1e-3, 3.0), (4e-3, 2.5), (8e-3, None))]
    writes = f"import json,sys; json.dump({{'rows': {rows!r}}}, open(sys.argv[1], 'w'))"
    go(tmp_path, part("sweep", writes.replace("None", "None")))
    reads = Part("long", "", ("{seconds}", "{muon}", "{adamw}"), (), 100, ending_seconds=20)
    place = run.Place(tmp_path, tmp_path)
    assert run.command_of(reads, ONE_GPU, place) == ("80", "0.004", "7e-4")
    assert run.command_of(reads, ONE_GPU, replace(place, folder=tmp_path / "none")) == ("80", run.RATE, "7e-4")


FIGURES = {
    "runs": {"runs": {"a": {"losses": {"1": 5.0, "2": 4.0}, "fault": ""}, "b": {"losses": {}, "skipped": "no"}}},
    "links": {"rows": [{"collective": "all_to_all", "bytes": 1024, "us": 9.0, "gb_s": 1.0}]},
    "steps": {"rows": [{"name": "AdamW", "ms": 1.0, "counts": {"calls": 2}}]},
    "checks": {"checks": [{"name": "memory", "measured": {"taken": 1}}]},
}


@pytest.mark.parametrize("kind", FIGURES)
def test_every_kind_of_figures_has_a_table(kind: str) -> None:
    lines = report.table(report.rows_of(FIGURES[kind])).splitlines()
    assert len({line.count(" | ") for line in lines}) == 1
    assert len(lines) > 2


def test_without_a_gpu_the_rehearsals_run_and_the_last_line_reports_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real = part("a", "raise SystemExit(1)", rehearsal=("{python}", "-c", "pass"))
    assert go(tmp_path, real, part("b", least_gpus=2), environment=NO_GPU) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no GPU: rehearsed on the CPU and on fake tensors, nothing was measured"
    assert any(line.startswith("a  passed") for line in lines)
    assert any(line.startswith("b  passed") for line in lines), "the CPU has any number of ranks"
    assert outcome(tmp_path, "a").source == "rehearsed"


def test_a_failed_rehearsal_prints_the_failure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert go(tmp_path, part("a", "raise SystemExit(1)"), environment=NO_GPU) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no GPU, and the rehearsal failed"


def test_a_part_for_more_gpus_is_not_run_and_no_failure(tmp_path: Path) -> None:
    assert go(tmp_path, part("a", least_gpus=2)) == 0
    assert outcome(tmp_path, "a").reason == "needs 2 GPUs, and there is 1"


def test_torn_and_foreign_results_are_run_again(tmp_path: Path) -> None:
    counter = counting("a", tmp_path)
    for text in ("{", "[]", "{}", '{"a": {"part": "a"}}'):
        (tmp_path / results.FILE).write_text(text)
        assert go(tmp_path, counter) == 0
    assert ran(tmp_path) == ["a"] * 4


def test_figures_without_valid_json_are_a_failure(tmp_path: Path) -> None:
    assert go(tmp_path, part("a", "import sys; open(sys.argv[1], 'w').write('{')")) == 1
    assert "is not JSON" in outcome(tmp_path, "a").reason


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (("--parts", "a", "nosuch"), ONE_GPU, "there is no part nosuch; the parts are a"),
        (("--call", "2", "--parts", "a"), ONE_GPU, "call 2 has no part a; leave out --call, or --parts"),
        (("--out", "/proc/nothing"), ONE_GPU, "--out /proc/nothing: cannot be written to"),
        (("--python", "/no/python"), None, "/no/python does not run: "),
        (("--python", "/bin/false"), None, "/bin/false cannot run PyTorch"),
    ],
)
def test_bad_input_is_refused_before_the_first_part(
    words: tuple[str, ...], environment: Environment | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert go(tmp_path, counting("a", tmp_path), environment=environment, words=words) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_file_at_the_place_of_the_output_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert go(tmp_path / "file", part("a")) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_gpu_unusable_for_torch_differs_from_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environments.unused_gpus(tmp_path, "2.15.0", "13.2") == ""
    (tmp_path / "nvidia0").write_text("")
    assert "the driver may be too old" in environments.unused_gpus(tmp_path, "2.15.0", "13.2")
    assert "it was built with no CUDA" in environments.unused_gpus(tmp_path, "2.15.0", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environments.unused_gpus(tmp_path, "2.15.0", "13.2") == ""


def test_the_first_interpreter_with_a_gpu_is_taken_and_an_unused_gpu_is_no_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"no_torch": None, "old_driver": replace(NO_GPU, unused="this machine has a GPU"), "good": ONE_GPU}

    def ask(python: str) -> Environment:
        if (found := known.get(python)) is None:
            raise ValueError(f"{python} cannot run PyTorch")
        return found

    monkeypatch.setattr(environments, "ask", ask)
    monkeypatch.setattr(environments.shutil, "which", lambda name: name)
    monkeypatch.setattr(environments, "CANDIDATES", ("no_torch", "old_driver", "good"))
    assert environments.choose("") is ONE_GPU
    for named in ("old_driver", "no_torch"):
        with pytest.raises(ValueError, match=r"(has a GPU|cannot run PyTorch).*make gpu PYTHON_GPU="):
            environments.choose(named)
    known["cpu"] = NO_GPU
    assert environments.choose("cpu") is NO_GPU


def test_an_interpreter_with_an_older_torch_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(asdict(replace(ONE_GPU, torch='2.9.1')))}'\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"has torch 2.9.1, and 2.11 is the oldest"):
        environments.ask(str(python))


def test_wheels_are_installed_without_a_network_or_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    environment = replace(ONE_GPU, executable=sys.executable)
    assert run.with_wheels(environment, tmp_path / "target", tmp_path / "none") == (environment, ())
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no wheel")
    assert run.with_wheels(environment, tmp_path / "target", tmp_path) == (environment, ())
    assert "make gpu-wheels WHEEL_PYTHON=3.11.0" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8)])
def test_ranks_are_a_power_of_two(gpus: int, ranks: int) -> None:
    environment = replace(ONE_GPU, gpus=("GPU X",) * gpus)
    assert environment.ranks == ranks
    # A single GPU is shared by as many ranks as the layouts need.
    assert environment.exchanging_ranks == (ranks if gpus > 1 else 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_the_part_and_the_next_run_continues(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys; from benchmarks.gpu import run; from tests.unit.benchmarks.test_gpu_run import *\n"
        # Background processes ignore the signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"run.end_as_interrupted(); folder = Path({str(tmp_path)!r})\n"
        "sys.exit(go(folder, counting('a', folder), part('slow', SLEEPS.format(file=str(folder / 'child')))))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(environments.ROOT)})
    deadline = time.monotonic() + 60
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline, "the slow part did not start"
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == 130
    assert gone(int((tmp_path / "child").read_text()))
    assert go(tmp_path, counting("a", tmp_path), part("slow")) == 0
    assert ran(tmp_path) == ["a"]


def test_parts_of_a_call_fit_in_its_limit_one_by_one() -> None:
    assert all(item.seconds < run.LIMIT for item in PARTS)
    assert {item.call for item in PARTS if item.least_gpus == 1} == set(CALLS)
    assert len({item.name for item in PARTS}) == len(PARTS)


@pytest.mark.parametrize("item", PARTS, ids=lambda item: item.name)
@pytest.mark.parametrize("environment", [ONE_GPU, NO_GPU], ids=["gpu", "rehearsal"])
def test_every_command_is_complete_and_names_existing_files(
    item: Part, environment: Environment, tmp_path: Path
) -> None:
    words = run.command_of(item, environment, run.Place(tmp_path, tmp_path))
    assert not any("{" in word for word in words)
    assert words
    assert item.unrehearsed
    for word in words:
        if word.startswith(("benchmarks.", "tests.")):
            assert (environments.ROOT / f"{word.replace('.', '/')}.py").is_file()
        elif word.endswith(".py") or word == "tests/gpu":
            assert (environments.ROOT / word).exists()
