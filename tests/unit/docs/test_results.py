"""Results pages: generated from numbers, with short conclusions."""

import json
from pathlib import Path

from docs import make_results

DOCS = Path(make_results.__file__).parent


def test_the_page_of_plans_is_generated() -> None:
    assert make_results.PAGE.read_text(encoding="utf-8") == make_results.written(), "run docs/make_results.py"


def test_every_result_file_names_date_commit_machine_and_command() -> None:
    files = sorted(make_results.FOLDER.glob("plan_*.json"))
    assert files
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert all(document[key] for key in ("date", "commit", "machine", "command", "rows")), file.name


def test_conclusions_are_short() -> None:
    assert len((DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()) <= 60
