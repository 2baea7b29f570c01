"""Every fault applies to the code, and a test that exists noticed it."""

import json

from tests.mutants.run import HERE, mutants


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
