"""docs/faults.md and docs/troubleshooting.md quote the messages of faults."""

import re
from pathlib import Path

from titan_muon.comm.faults import REMEDIES, Fault
from titan_muon.titan.checks.ranks import NOT_ZERO

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "faults.md").read_text(encoding="utf-8")


def test_every_fault_of_a_step_has_a_row_with_the_message() -> None:
    section = PAGE.split("## Faults of a step\n")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(quoted) == len(REMEDIES) == len(Fault) - 1
    for text, remedy in zip(quoted, REMEDIES.values(), strict=True):
        assert text in remedy, text


def test_every_fault_of_a_report_has_a_row_with_the_message() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("## Checks of a sound run\n")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    for text in NOT_ZERO.values():
        assert any(quote in text for quote in quoted), text
