"""Digests beside saved checkpoints, and their comparison after a load."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from .ranks import Digest

Found = dict[tuple[str, str], list[str]]
"""Names by code and evidence. The code is empty for an undecided name."""
Table = dict[str, dict[str, Digest]]
"""Digests by name of a parameter and key of a state, or "weight"."""


def follow(hooks: ExitStack, owner: Any, name: str, after: Any = None, before: Any = None) -> None:
    """Until `hooks` close, act before and after each call of `owner.name`, with its arguments."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    hooks.enter_context(patch.object(owner, name, call))


def follow_files(hooks: ExitStack, verb: str, position: int, act: Callable[[Path], Any]) -> None:
    """Act after each load or save, by `torch` or `torch.distributed.checkpoint`, of a path in this argument."""

    def after(*args: Any, f: Any = None, checkpoint_id: Any = None, **_: Any) -> None:
        for place in (f, checkpoint_id, *args[position : position + 1]):
            if isinstance(place, str | Path):
                act(Path(place))

    for module in (torch, dcp):
        follow(hooks, module, verb, after)


def differences(paths: Sequence[Path], tables: Sequence[Table]) -> Found:
    """Weights and states that differ from the loaded checkpoint with the fewest differences, by the digests beside it.

    Args: `tables` after the load, one a rank. A run that starts with no state at all loaded the weights only.
    """
    results, restored = list[Found](), any(len(states) > 1 for table in tables for states in table.values())
    for path in dict.fromkeys(paths):
        saved = [json.loads(file.read_text()) for file in sorted(path.parent.glob(f"{path.name}.audit.*.json"))]
        found: Found = defaultdict(list)
        for name, key in dict.fromkeys((n, k) for table in saved for n, states in table.items() for k in states):
            if not any(name in table for table in tables) or (key != "weight" and not restored):
                continue
            # Replicas of a place count once, and pieces of other places add up.
            then, now = ({e[0]: e[1:] for t in side if (e := t.get(name, {}).get(key))} for side in (saved, tables))
            old, new = ([sum(parts) for parts in zip(*side.values(), strict=True)] for side in (then, now))
            if not new:
                found["resume", f"{key} of {path.name} was not restored"].append(name)
            elif old[2] != new[2]:
                found["", f"{path.name} has digests of a part of {key}"].append(name)
            elif abs(old[0] - new[0]) > 0.01 * max(old[1], new[1]) ** 0.5:
                found["resume", f"{key} is not that of {path.name}"].append(name)
        # Other files, as of data, say nothing.
        results += [found] if saved else []
    return min(results, key=lambda found: sum(code != "" for code, _ in found), default=defaultdict(list))
