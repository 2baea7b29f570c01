"""Every fault applies to the code, and a run records who noticed."""

import json
from pathlib import Path

import pytest

from tests.mutants.run import HERE, main, mutants

FAULTS = """
[[mutant]]
id = "noticed"
fault = "A sum is a difference."
file = "made/arithmetic.py"
old = "a + b"
new = "a - b"
[[mutant]]
id = "not-noticed"
fault = "A product is a quotient."
file = "made/arithmetic.py"
old = "a * b"
new = "a / b"
"""


def test_the_text_of_each_fault_occurs_once() -> None:
    for mutant in mutants(HERE / "mutants.toml"):
        code = (HERE.parents[1] / mutant.file).read_text(encoding="utf-8")
        assert code.count(mutant.old) == 1, f"{mutant.id}: {mutant.fault}"


def test_every_fault_was_noticed_by_a_test_that_exists() -> None:
    results = json.loads((HERE / "noticed.json").read_text(encoding="utf-8"))
    assert results.keys() == {mutant.id for mutant in mutants(HERE / "mutants.toml")}
    for fault, result in results.items():
        file, _, name = result["noticed_by"].partition("::")
        assert f"def {name.partition('[')[0]}(" in (HERE.parents[1] / file).read_text(encoding="utf-8"), fault


def test_a_run_records_the_first_test_that_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, results, faults = tmp_path / "code", tmp_path / "noticed.json", tmp_path / "faults.toml"
    (root / "made").mkdir(parents=True)
    (root / "made" / "arithmetic.py").write_text("def plus(a, b): return a + b\ndef times(a, b): return a * b\n")
    (root / "tests" / "parity").mkdir(parents=True)
    test = "from made.arithmetic import plus\ndef test_plus(): assert plus(1, 1) == 2, __file__\n"
    (root / "tests" / "parity" / "test_sums.py").write_text(test)
    faults.write_text(FAULTS)
    words = ["--root", str(root), "--results", str(results), "--mutants", str(faults)]
    main([*words, "--only", "noticed"])
    main([*words, "--resume", "--rows-only"])
    recorded = json.loads(results.read_text())
    assert recorded["noticed"]["noticed_by"] == "tests/parity/test_sums.py::test_plus"
    assert recorded["noticed"]["error"] == "AssertionError: ..."
    assert recorded["not-noticed"]["noticed_by"] is None
    assert set(recorded) == {"noticed", "not-noticed"}
    assert "2 faults, 1 noticed, 1 of them by a row" in capsys.readouterr().out
    main([*words, "--list"])
    assert "not-noticed: A product is a quotient. NOT NOTICED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--only", "unknown"])
    assert "no fault unknown" in capsys.readouterr().err
