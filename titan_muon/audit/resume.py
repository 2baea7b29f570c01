"""Digests beside checkpoints: written by every save, and compared before the first step after a load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .ranks import combined


def record(path: str, rank: int, table: Mapping[str, Any]) -> None:
    """Write a rank's digests of weights and states to `PATH.audit.RANK.json`."""
    place = path.rstrip("/")
    Path(f"{place}.audit.{rank}.json").write_text(json.dumps(table))


def compare(paths: Sequence[str], tables: Sequence[Mapping[str, Any]], restored: bool) -> list[tuple[str, str, str]]:
    """Names, codes and evidence of weights and states that differ from the loaded checkpoint with the fewest differences.

    The code is "resume", or empty for a difference that cannot be decided. States count only if an optimizer was `restored`.
    """
    results = []
    for path in dict.fromkeys(p.rstrip("/") for p in paths):
        files = sorted(Path(path).parent.glob(f"{Path(path).name}.audit.*.json"))
        saved = [json.loads(file.read_text()) for file in files]
        if saved:
            results.append(_differences(Path(path).name, saved, tables, restored))
    return min(results, key=lambda found: sum(code != "" for _, code, _ in found), default=[])


def _differences(path: str, saved: Sequence[Any], tables: Sequence[Any], restored: bool) -> list[tuple[str, str, str]]:
    found = []
    entries = {(name, key): entry for table in saved for name, keys in table.items() for key, entry in keys.items()}
    for name, key in entries:
        if not any(name in table for table in tables) or (key != "weight" and not restored):
            continue
        size = max(
            sum({e[0]: e[3] for t in side if (e := t.get(name, {}).get(key))}.values()) for side in (saved, tables)
        )
        old, new = combined(saved, name, key, size), combined(tables, name, key, size)
        if not any(key in table.get(name, {}) for table in tables):
            found.append((name, "resume", f"{key} of {path} was not restored"))
        elif old is None or new is None:
            found.append((name, "", f"{path} has digests of a part of {key} only"))
        elif abs(old[0] - new[0]) > 0.01 * max(old[1], new[1]):
            found.append((name, "resume", f"{key} is not that of {path}"))
    return found
