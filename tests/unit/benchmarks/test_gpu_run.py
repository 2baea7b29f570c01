"""`make gpu`: parts run in turn despite failures, and continue after an interruption; bad input."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import environment as environments
from benchmarks.gpu import parts, report, results, run
from benchmarks.gpu.environment import Environment
from benchmarks.gpu.parts import PARTS, Part
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


def go(folder: Path, *selected: Part, environment: Environment = ONE_GPU, words: tuple[str, ...] = ()) -> int:
    return run.main(["--out", str(folder), *words], selected, environment)


def outcome(folder: Path, name: str) -> Result:
    result = results.read(name, folder)
    assert result is not None
    return result


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
    assert json.loads((tmp_path / "report.json").read_text())["parts"]["a"]["outcome"] == "passed"


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


def test_the_report_holds_every_part(tmp_path: Path) -> None:
    selected = (
        part("a"),
        part("bad", "print('<tag>'); raise SystemExit(1)"),
        part("needy", needs=("nothing_such",)),
        part("last"),
    )
    go(tmp_path, *selected, words=("--parts", "a", "bad", "needy"))
    document = json.loads((tmp_path / "report.json").read_text())
    assert list(document["parts"]) == ["a", "bad", "needy", "last"]
    assert document["environment"]["gpus"] == ["GPU X"]
    assert [document["parts"][name]["outcome"] for name in ("a", "bad", "needy")] == ["passed", "failed", "not run"]
    assert document["parts"]["last"] is None
    page = (tmp_path / "report.html").read_text()
    assert all(f"<h2>{item.name}</h2>" in page for item in selected)
    assert "&lt;tag&gt;" in page
    assert "needs the package nothing_such" in page
    assert "data:image/png;base64," in page
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert sorted(archive.namelist()) == ["report.html", "report.json"]


FIGURES = {
    "runs": {"runs": {"a": {"losses": {"1": 5.0, "2": 4.0}, "fault": ""}, "b": {"losses": {}, "skipped": "no"}}},
    "links": {"rows": [{"collective": "all_to_all", "bytes": 1024, "us": 9.0, "gb_s": 1.0}]},
    "rates": {"rows": [{"shape": "1 x 2", "name": "gram", "ms": 1.0, "of_matmul": 0.5}]},
    "steps": {"rows": [{"name": "AdamW", "ms": 1.0, "counts": {"calls": 2}}]},
    "placements": {"rows": [{"name": "owned", "step_ms": 1.0}]},
    "checks": {"checks": [{"name": "memory", "measured": {"taken": 1}}]},
    "nothing": {},
}


@pytest.mark.parametrize("kind", FIGURES)
def test_every_kind_of_figures_has_a_table_and_most_a_picture(kind: str) -> None:
    shown = report.section(part(kind), Result(kind, Outcome.PASSED, "", 1.0, (), ONE_GPU, FIGURES[kind]))
    assert ("<table>" in shown) == (kind != "nothing")
    assert ("<img" in shown) == (kind not in ("nothing", "checks"))


def test_without_a_gpu_the_rehearsals_run_and_the_last_line_reports_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real = part("a", "raise SystemExit(1)", rehearsal=("{python}", "-c", "pass"))
    unrehearsed = part("b", rehearsal=(), unrehearsed="all of it")
    assert go(tmp_path, real, unrehearsed, environment=NO_GPU) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no GPU: rehearsed on fake tensors only"
    assert any(line.startswith("a  passed") for line in lines)
    assert "b  not run: no rehearsal (all of it)" in lines


def test_a_failed_rehearsal_prints_the_failure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert go(tmp_path, part("a", "raise SystemExit(1)"), environment=NO_GPU) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no GPU, and the rehearsal failed"


def test_a_part_for_more_gpus_is_not_run_and_no_failure(tmp_path: Path) -> None:
    assert go(tmp_path, part("a", least_gpus=2)) == 0
    assert outcome(tmp_path, "a").reason == "needs 2 GPUs, and there is 1"


def test_torn_and_foreign_results_are_run_again(tmp_path: Path) -> None:
    counter = counting("a", tmp_path)
    for text in ("{", "[]", "{}", '{"part": "a"}'):
        (tmp_path / "a.json").write_text(text)
        assert go(tmp_path, counter) == 0
    assert ran(tmp_path) == ["a"] * 4


def test_figures_without_valid_json_are_a_failure(tmp_path: Path) -> None:
    assert go(tmp_path, part("a", "import sys; open(sys.argv[1], 'w').write('{')")) == 1
    assert "is not JSON" in outcome(tmp_path, "a").reason


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (("--parts", "a", "nosuch"), ONE_GPU, "there is no part nosuch; the parts are a"),
        (("--out", "/proc/nothing"), ONE_GPU, "--out /proc/nothing: cannot be written to"),
        (
            (),
            replace(NO_GPU, unused="this machine has a GPU"),
            "this machine has a GPU. Name one that fits: make gpu PYTHON_GPU=",
        ),
    ],
)
def test_bad_input_is_refused_before_the_first_part(
    words: tuple[str, ...], environment: Environment, says: str, tmp_path: Path, capsys: pytest.CaptureFixture
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


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8)])
def test_ranks_are_a_power_of_two(gpus: int, ranks: int) -> None:
    assert replace(ONE_GPU, gpus=("GPU X",) * gpus).ranks == ranks


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


def test_the_parts_fit_in_the_documented_time() -> None:
    assert sum(item.seconds for item in PARTS) <= parts.TOTAL_SECONDS
    assert len({item.name for item in PARTS}) == len(PARTS)


@pytest.mark.parametrize("item", PARTS, ids=lambda item: item.name)
@pytest.mark.parametrize("environment", [ONE_GPU, NO_GPU], ids=["gpu", "rehearsal"])
def test_every_command_is_complete_and_names_existing_files(
    item: Part, environment: Environment, tmp_path: Path
) -> None:
    words = run.command_of(item, environment, tmp_path)
    assert not any("{" in word for word in words)
    assert words or item.unrehearsed
    for word in words:
        if word.startswith(("benchmarks.", "tests.")):
            assert (environments.ROOT / f"{word.replace('.', '/')}.py").is_file()
        elif word.endswith(".py") or word == "tests/gpu":
            assert (environments.ROOT / word).exists()
