"""Compares assignments with an earlier run's: a renamed parameter may fall to a default optimizer."""

from collections.abc import Mapping

from titan_muon.assignment.table import HEADER

LISTED = 8


def assigned_optimizers(text: str) -> dict[str, str]:
    """Optimizer by parameter name, from the text of `optimizers.txt`."""
    assigned: dict[str, str] = {}
    start, end = -1, -1
    for line in text.splitlines():
        if line.startswith(f"{HEADER.name} ") and HEADER.optimizer in line:
            start, end = line.index(HEADER.optimizer), line.index(HEADER.matrices)
        elif not line:
            start = -1
        elif start >= 0:
            assigned[line.split()[0]] = line[start:end].strip()
    return assigned


def changed_assignments(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each new, missing or reassigned parameter. Empty for another model."""
    if not before.keys() & after.keys():
        return []
    lines = []
    for name in dict.fromkeys((*before, *after)):
        if name not in after:
            lines.append(f"{name} is not trained, and was by {before[name]} in the run before")
        elif name not in before:
            lines.append(f"{name} is trained by {after[name]}, and was not trained in the run before")
        elif before[name] != after[name]:
            lines.append(f"{name} is trained by {after[name]}, and was by {before[name]} in the run before")
    more = len(lines) - LISTED
    return lines[:LISTED] + ([f"{more} more parameters differ from the run before"] if more > 0 else [])
