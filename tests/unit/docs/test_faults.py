"""docs/faults.md quotes the message of every fault of a step."""

import re
from pathlib import Path

from titan_muon.comm.faults import REMEDIES, Fault

PAGE = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_fault_of_a_step_has_a_row_with_the_message() -> None:
    section = PAGE.split("## Faults of a step\n")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(quoted) == len(REMEDIES) == len(Fault) - 1
    for text, remedy in zip(quoted, REMEDIES.values(), strict=True):
        assert text in remedy, text
