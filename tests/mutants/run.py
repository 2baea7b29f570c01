"""Put each fault of `mutants.toml` into a copy of the repository, and record the first test that notices.

    python -m tests.mutants.run --only replica-momentum-stays
    python -m tests.mutants.run --resume

The unit tests that import the module of the fault run first, because they take seconds. Then come the rows of
tests/parity, other tests that import the module, the tests of its folder, and the tests of a step. The results are in
`noticed.json`, written after each fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROWS = "tests/parity"
RECIPES = "titan_muon/trainer/"
STEP_TESTS = tuple(
    f"tests/{place}"
    for place in ("unit/test_rules.py", "unit/test_hybrid.py", "dist/step", "dist/features", "dist/comm", "dist/owned")
)
HANG = "a hang"
"""A run that takes longer than the time limit notices the fault."""
SECONDS = 900
IGNORED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs")


@dataclass(frozen=True)
class Mutant:
    """A fault: a text that occurs once in a file, and the text for it."""

    id: str
    fault: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Result:
    """The first test that failed, or None, its error, and whether it is a row."""

    noticed_by: str | None
    error: str
    is_row: bool
    seconds: int


def mutants(file: Path) -> list[Mutant]:
    """The faults of a file."""
    return [Mutant(**item) for item in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]]


def failure(root: Path, tests: Sequence[str], seconds: int) -> tuple[str | None, str]:
    """The first failing test, or None, and the first line of its error."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        words, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        shown, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        return HANG, ""
    # 5: no test was collected.
    if run.returncode in (0, 5):
        return None, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", shown, re.MULTILINE)
    error = re.search(r"^E +(.{,200})", shown, re.MULTILINE)
    name = failed.group(1) if failed else shown.strip().splitlines()[-1]
    # Names of temporary folders differ between runs.
    return name, re.sub(rf"{tempfile.gettempdir()}[^ :'\"]*", "...", error.group(1)) if error else ""


def importing_tests(root: Path, kind: str, file: str) -> Iterator[str]:
    """Tests of a kind, `unit` or `dist`, that import the module."""
    module = file.removesuffix(".py").replace("/", ".")
    package, name = module.rpartition(".")[::2]
    imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    for test in sorted(root.glob(f"tests/{kind}/**/test_*.py")):
        if imports.search(test.read_text(encoding="utf-8")):
            yield str(test.relative_to(root))


def other_tests(root: Path, file: str) -> Iterator[str]:
    """Tests besides the rows and `importing_tests` of the units, the most likely ones first."""
    yield from importing_tests(root, "dist", file)
    folder = Path(file).parent.relative_to(Path(file).parts[0])
    yield from (f"tests/{kind}/{folder}" for kind in ("unit", "dist") if (root / "tests" / kind / folder).is_dir())
    yield from (tests for tests in STEP_TESTS if (root / tests).exists())


def run(mutant: Mutant, root: Path, seconds: int) -> Result:
    """Apply a fault in `root`, test, and restore the file. Raises ValueError if its text does not occur once."""
    file, begun = root / mutant.file, time.monotonic()
    original = file.read_text(encoding="utf-8")
    if original.count(mutant.old) != 1:
        raise ValueError(f"{mutant.id}: {mutant.file} has the text {original.count(mutant.old)} times; correct it")
    # No row trains a recipe.
    rows = [] if mutant.file.startswith(RECIPES) else [ROWS]
    stages = [importing_tests(root, "unit", mutant.file), rows, dict.fromkeys(other_tests(root, mutant.file))]
    noticed, error, is_row = None, "", False
    try:
        _write(file, original.replace(mutant.old, mutant.new))
        for tests in filter(None, map(list, stages)):
            noticed, error = failure(root, tests, seconds)
            if noticed is not None:
                is_row = tests == [ROWS]
                break
    finally:
        _write(file, original)
    return Result(noticed, error, is_row, round(time.monotonic() - begun))


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    # Python compares times in seconds, and a run is short.
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these faults")
    parser.add_argument("--resume", action="store_true", help="leave out faults with a result")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time limit of the rows, and of other tests")
    chosen, file = parser.parse_args(), HERE / "noticed.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    listed = mutants(HERE / "mutants.toml")
    if unknown := set(chosen.only or ()) - {mutant.id for mutant in listed}:
        parser.error(f"no fault {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "code")
        shutil.copytree(HERE.parents[1], root, ignore=IGNORED)
        for mutant in listed:
            if (chosen.only and mutant.id not in chosen.only) or (chosen.resume and mutant.id in results):
                continue
            result = run(mutant, root, chosen.seconds)
            print(f"{mutant.id}: {result.noticed_by or 'NOT NOTICED'} ({result.seconds} s)", flush=True)
            results[mutant.id] = asdict(result)
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
