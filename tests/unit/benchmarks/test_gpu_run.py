"""`make gpu`: parts run in turn despite failures and continue after an interruption, and figures become pages."""

import json
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.gpu import environment as environments
from benchmarks.gpu import links, report, results, run, training
from benchmarks.gpu.environment import Environment
from benchmarks.gpu.links import MeasuredMachine, Row
from benchmarks.gpu.parts import CALLS, PARTS, Part
from benchmarks.gpu.results import Outcome, Result
from titan_muon.options import Machine, OptionError
from titan_muon.plan.terms.machine import machine_of

ONE_GPU = Environment(("GPU X",), "2.15.0", "13.2", "600.1", "3.11.0", "abc123", ("tyro", "pytest"))
NO_GPU = replace(ONE_GPU, gpus=())
FIGURES = {"rows": [{"name": "a", "ms": 1.5}]}
WRITES = f"import json,sys; json.dump({FIGURES}, open(sys.argv[1], 'w')); print('done')"
FAILS = "print('what went wrong'); raise SystemExit(3)"


def part(name: str, code: str = WRITES, **values: object) -> Part:
    command = ("{python}", "-c", code, "{json}")
    fields = {"shows": f"what {name} shows", "command": command, "rehearsal": command, "seconds": 20}
    return Part(name, **{**fields, **values})  # type: ignore[arg-type]


def counting(name: str, folder: Path) -> Part:
    """A part that appends its name to a file in each run."""
    return part(name, f"open({str(folder / 'ran')!r}, 'a').write('{name} ')")


def go(folder: Path, *selected: Part, environment: Environment | None = ONE_GPU, words: tuple[str, ...] = ()) -> int:
    return run.main(["--out", str(folder), *words], selected, environment)


def outcome(folder: Path, name: str) -> Result:
    return results.read(folder / results.FILE)[name]


def test_a_second_run_skips_the_parts_that_passed_with_this_machine_and_code(tmp_path: Path) -> None:
    both = counting("a", tmp_path), counting("b", tmp_path)
    assert go(tmp_path, *both, words=("--parts", "a")) == 0
    assert go(tmp_path, *both) == 0
    assert go(tmp_path, *both, words=("--again", "--parts", "b")) == 0
    go(tmp_path, both[0], environment=replace(ONE_GPU, gpus=("GPU Y",)))
    assert (tmp_path / "ran").read_text().split() == ["a", "b", "b", "a"]
    (tmp_path / results.FILE).write_text("{")
    assert go(tmp_path, both[0]) == 0, "a torn file of results"


def test_a_failed_part_stops_no_later_part_and_sets_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = part("torn", "import sys; open(sys.argv[1], 'w').write('{')")
    assert go(tmp_path, part("bad", FAILS), torn, part("large", least_gpus=2), part("good")) == 1
    bad = outcome(tmp_path, "bad")
    assert (bad.outcome, bad.figures, "exit code 3" in bad.reason) == (Outcome.FAILED, None, True)
    assert "is not JSON" in outcome(tmp_path, "torn").reason
    assert outcome(tmp_path, "large").reason == "needs 2 GPUs, and there is 1"
    assert outcome(tmp_path, "good").figures == FIGURES
    assert "what went wrong" in capsys.readouterr().out


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


def test_a_part_over_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    slow = part("slow", SLEEPS.format(file=str(tmp_path / "child")), seconds=2)
    assert go(tmp_path, slow, part("good")) == 1
    assert outcome(tmp_path, "slow").outcome is Outcome.OUT_OF_TIME
    assert outcome(tmp_path, "good").outcome is Outcome.PASSED
    assert gone(int((tmp_path / "child").read_text()))


def test_the_files_are_renewed_after_each_part_and_the_archive_has_every_log(tmp_path: Path) -> None:
    folder, names = tmp_path / "out", ["machine.json", "measured.json", "report.md", "results.json", "results.tgz"]
    seen = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sorted(os.listdir({str(folder)!r}))))"
    go(folder, part("parity"), part("float16", seen), part("links", "raise SystemExit(1)"))
    assert (tmp_path / "seen").read_text().split() == names, "complete before the second part"
    with tarfile.open(folder / report.ARCHIVE) as archive:
        assert {"float16.log", "links.log", "parity.log", "parity.figures"} < {*archive.getnames()}
    page = (folder / report.PAGE).read_text()
    assert "| parity | 1 | passed |" in page
    assert "| links | 1 | failed exit code 1, see links.log in results.tgz |" in page


def test_without_a_gpu_the_rehearsals_run_and_the_last_line_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = part("a", FAILS, rehearsal=("{python}", "-c", "pass"))
    assert go(tmp_path, real, part("b", least_gpus=2), environment=NO_GPU) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no GPU: rehearsed on the CPU and on fake tensors")
    assert outcome(tmp_path, "a").source == "rehearsed"
    assert go(tmp_path, part("c", FAILS), environment=NO_GPU) == 1


def test_bad_input_is_refused_before_the_first_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, counting("a", tmp_path), words=("--parts", "a", "nosuch")) == 2
    assert "there is no part nosuch; the parts are a" in capsys.readouterr().err
    assert go(tmp_path, counting("a", tmp_path), environment=None, words=("--python", "/bin/false")) == 2
    assert "/bin/false cannot run PyTorch" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("environment", [ONE_GPU, NO_GPU], ids=["gpu", "rehearsal"])
def test_every_command_is_complete_and_names_existing_files(environment: Environment, tmp_path: Path) -> None:
    for item in PARTS:
        words = run.command_of(item, environment, run.Place(tmp_path, tmp_path))
        assert words
        assert not any("{" in word for word in words)
        assert item.seconds < run.LIMIT
        assert item.call in CALLS or item.least_gpus > 1
        for word in words:
            if word.startswith(("benchmarks.", "tests.")):
                assert (environments.ROOT / f"{word.replace('.', '/')}.py").is_file()
            elif word.endswith(".py") or word == "tests/gpu":
                assert (environments.ROOT / word).exists()


# Figures


def test_the_measured_machine_is_one_for_the_planner() -> None:
    """Latency comes from the smallest size, and bandwidth leaves it out: links of 40 GB/s and 12 us for 8 ranks."""
    sizes = {2**power: 12e-6 + 2**power * 7 / 8 / 40e9 for power in (28, 26, 10)}
    rows = [Row("all_to_all", n, seconds * 1e6, n * 7 / 8 / seconds / 1e9) for n, seconds in sizes.items()]
    assert links.link_of(rows) == (pytest.approx(40e9, rel=1e-6), pytest.approx(12e-6, rel=0.01))
    flops = {"bfloat16": 7e14, "float16": 6.5e14, "float32": 5e13}
    measured = MeasuredMachine("GPU X", 16, 8, 41.3e9, 12.34e-6, flops, 3e12)
    machine = machine_of(Machine(name="h200x8", file="machine.json"), "cuda", json.dumps(asdict(measured)))
    assert (machine.flops, machine.memory, machine.network.bandwidth) == (flops, 3e12, 41.3e9)
    assert machine.node == machine_of(Machine(name="h200x8")).node, "nothing was measured within a node"
    with pytest.raises(OptionError, match=r"machine.file = 'machine.json' .*it was rehearsed without a GPU"):
        machine_of(Machine(file="machine.json"), "cuda", json.dumps({"source": "rehearsed", "flops": {}}))


PART_FIGURES = {
    "links": {"machine": {"gpu": "GPU X", "memory_bandwidth": 3e12}},
    "newton_schulz": {"kernels": [{"dtype": "float16", "rows": 256, "products": "triton"}], "rows": []},
    "rank_kimi_k2": {"fused_is_faster": True, "rows": [{"source": "measured", "step": "plain", "device ms": 2.5}]},
}


@pytest.mark.parametrize(("gpus", "known"), [((), ["GPU Y"]), (("GPU X",), ["GPU X", "GPU Y"])])
def test_measured_results_are_published_and_rehearsed_ones_leave_the_model_alone(
    gpus: tuple[str, ...], known: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, shipped = replace(ONE_GPU, gpus=gpus), tmp_path / "shipped.json"
    shipped.write_text('{"GPU Y": {"source": "measured"}}')
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SHIPPED", shipped)
    parts = [Result(name, Outcome.PASSED, "", 1.0, (), environment, f) for name, f in PART_FIGURES.items()]
    results.write(parts, tmp_path)
    file = (tmp_path / results.FILE).rename(tmp_path / "of_a_run.json")
    assert report.main([str(file)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert ("| measured | plain | 2.5 |" in page) == bool(gpus)
    assert ("No GPU has run the parts" in page) == (not gpus)
    assert list(json.loads(shipped.read_text())) == known


def test_the_page_of_results_is_of_its_data() -> None:
    """`python -m benchmarks.gpu.report` writes both."""
    kept = results.read(report.DOCS / "gpu.json")
    assert (report.DOCS / "gpu.md").read_text() == report.page(kept, link="../gpu.md")


def test_every_training_case_is_a_valid_recipe() -> None:
    import models  # noqa: F401 (registers the families)
    from titan_muon.titan.recipe import load

    for way in training.WAYS.values():
        words = training.command(way, 2, 2, training.ROOT / "runs/x", tiny=True)
        arguments = words[words.index("--config") + 2 :]
        assert load(training.ROOT / training.RECIPE, arguments).training.steps == 2
