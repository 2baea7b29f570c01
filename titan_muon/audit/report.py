"""Findings, undecided names and a table by role."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .judge import FITS, WHOLE, Seen, Verdict

REMEDIES: Mapping[str, str] = {
    "sgd": "look for the call of Newton-Schulz, and for the condition that skips it",
    "inactive": "look at the rule that gives matrices to Muon: flat, empty and sharded shapes are no matrices",
    "per-micro-batch": "orthogonalize once a step, after the last backward pass",
    "micro-momentum": "update the momentum once a step, after the last backward pass",
    "per-shard": "gather the matrix before Newton-Schulz; allow this code for heads and MuonBP",
    "nesterov": "pass the option on to the update",
    "momentum": "pass the option on to the update",
    "coupled-decay": "multiply the weight by 1 - lr * weight_decay, and leave the gradient as it is",
    "decay": "multiply the weight by 1 - lr * weight_decay once in each step",
    "twice": "orthogonalize once, with the intended number of steps",
    "scale": "take rows and columns of the whole matrix, as nn.Linear stores it: (out, in)",
    "embedding": "give embeddings and output heads to AdamW",
    "sign": "subtract the update; state maximize, if the gradient is to be followed",
    "zero_grad": "call zero_grad once, after the step; allow this code for steps that drop a pass on purpose",
    "still": "look for a skipped step, and for an update of a copy that is not written back",
    "nobody": "give the parameter to an optimizer, or set requires_grad to False",
    "replicas": "reduce gradients before the step, and start all ranks from equal weights",
    "resume": "load weights and states after the last call that sets them, under the names of the saved ones",
}
"""The codes of findings, with remedies."""
EMBEDDING = re.compile(r"(^|\.)(wte|wpe|\w*embed\w*|lm_head|head|output|unembed\w*|classifier|score)\.weight$")
SMALL = re.compile(r"router|(^|\.)gate\.weight|norm")
RULES: Mapping[str, Callable[[float, float], float]] = {
    "1": lambda m, n: 1.0,
    "sqrt(max(1, m/n))": lambda m, n: max(1.0, m / n) ** 0.5,
    "0.2 sqrt(max(m, n))": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "sqrt(m/n)": lambda m, n: (m / n) ** 0.5,
}
SGD = "the step is a sum of gradients: Newton-Schulz never ran"
APART = "other values on each rank from the start: pieces of one matrix, or replicas with other gradients"
Found = dict[tuple[str, str], list[str]]
"""Names by code, or "undecided", and evidence."""


@dataclass(frozen=True)
class Finding:
    """A finding: code, names by role, and evidence. Names with the code "undecided" do not count."""

    code: str
    names: str
    evidence: str
    allowed: bool

    def __str__(self) -> str:
        text = f"{self.code}: {self.names}: {self.evidence}"
        if self.code == "undecided":
            return text
        return f"{'allowed' if self.allowed else 'FINDING'} {text}; {REMEDIES[self.code]}"


@dataclass(frozen=True)
class Report:
    """The result of an audit. `table` has a row for each role."""

    findings: tuple[Finding, ...] = ()
    table: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def codes(self) -> list[str]:
        """Codes of the findings that count, each once."""
        return list(dict.fromkeys(f.code for f in self.findings if f.code != "undecided" and not f.allowed))

    def __str__(self) -> str:
        rows = [*map(list, self.table[:1]), *(list(row.values()) for row in self.table)]
        sizes = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        lines = ["".join(x.ljust(n) for x, n in zip(row, sizes, strict=True)).rstrip() for row in rows]
        count = sum(f.code in self.codes for f in self.findings)
        last = f"{count} finding{'s' * (count != 1)}, judged in {self.seconds:.1f} s"
        return "\n".join([*lines, *map(str, self.findings), last])


def role_of(name: str) -> str:
    """A name without its numbers, which the layers of a model share."""
    return re.sub(r"\d+", "*", name)


def conclude(everyone: Sequence[Mapping[str, Seen]], verdicts: Mapping[str, Verdict], found: Found,
             allow: Collection[str], seconds: float) -> Report:  # fmt: skip
    """The report from the observations of all ranks, the verdicts on sampled parameters, and findings so far."""
    seen, equal = dict[str, Seen](), list[str]()
    for name in dict.fromkeys(name for part in everyone for name in part):
        parts = {rank: part[name] for rank, part in enumerate(everyone) if name in part}
        if any(s.optimizer or s.undecided or any(s.gradients) or len(set(s.digests)) > 1 for s in parts.values()):
            seen[name] = next(iter(parts.values()))
            equal += [name] * _compare_ranks(name, parts, found)
    for code, text in list(found):
        # Each rank trains a model of its own.
        if code == "replicas" and ("undecided", APART) in found and not equal:
            found["undecided", text] += found.pop((code, text))
    drifted = [name for (code, _), names in found.items() if code == "replicas" for name in names]
    judged = {name: verdicts[name] for name in seen if name in verdicts and name not in drifted}
    _check_kinds(seen, judged, found)
    rules = _check_sizes(seen, judged, found)
    roles = {name: (role_of(name), s.shape, s.optimizer) for name, s in seen.items()}
    counts = Counter(roles.values())
    rows = dict[Any, dict[str, str]]()
    for name in (*judged, *seen):
        verdict = judged.get(name, Verdict("not sampled"))
        rows.setdefault(roles[name], _row(seen[name], verdict, counts[roles[name]], rules.get(name, "")))
    findings = list[Finding]()
    for code, evidence in sorted(found, key=lambda key: key[0] != "undecided"):
        sizes = {name: counts[roles[name]] if name in roles else 1 for name in found[code, evidence]}
        names = dict.fromkeys(f"{role_of(name)} ({n})" if n > 1 else name for name, n in sizes.items())
        findings.append(Finding(code, ", ".join(names), evidence, code in allow))
    return Report(tuple(findings), tuple(rows[role] for role in counts), seconds)


def _row(s: Seen, v: Verdict, count: int, rule: str) -> dict[str, str]:
    unit = s.stated("lr") or 1.0
    return {
        "role": role_of(s.name),
        "count": str(count),
        "shape": "x".join(map(str, s.shape)),
        "optimizer": s.optimizer or "-",
        "update": v.kind,
        "error": f"{v.error:.4f}",
        "scale": rule or f"{v.scale / unit:.3g}",
        "decay": f"{v.decay / unit:.2g}",
        "momentum": "" if v.momentum is None else f"{v.momentum:.3g}{' n' if v.nesterov else ''}",
        "blocks": "whole" if v.blocks == WHOLE else "{} x {}".format(*v.blocks),
    }


def _compare_ranks(name: str, parts: Mapping[int, Seen], found: Found) -> bool:
    """Find a parameter that does not move, or has other values on ranks with one place. False if the ranks differ."""
    s = next(iter(parts.values()))
    if s.undecided:
        found["undecided", s.undecided].append(name)
    moved = len(s.digests) < 2 or any(len(set(part.digests)) > 1 for part in parts.values())
    if not moved and any(any(part.gradients) for part in parts.values()):
        excused = s.stated("lr") == 0 or (s.dtype != torch.float32 and len(s.shape) < 2)
        code = "undecided" if excused else "still" if s.optimizer else "nobody"
        found[code, "has a gradient and does not move"].append(name)
    for place in dict.fromkeys(part.place for part in parts.values()):
        held = {rank: part for rank, part in parts.items() if part.place == place and part.digests}
        gradients = list(zip(*(part.gradients for part in held.values()), strict=False))
        reduced = any(map(any, gradients)) and all(len(set(values)) == 1 for values in gradients)
        steps = (*zip(*(part.digests for part in held.values()), strict=False), [p.digests[-1] for p in held.values()])
        for step, values in enumerate(steps, start=1):
            odd = [str(rank) for rank, x in zip(held, values, strict=True) if x != max(values, key=values.count)]
            if odd:
                text = f"rank {', '.join(odd)} has other values before step {step}"
                found[("undecided", APART) if step == 1 and not reduced else ("replicas", text)].append(name)
                return False
    return moved


def _check_kinds(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Found) -> None:
    """Find updates of another kind than the optimizer says."""
    groups = {name: s.groups[-1] if s.groups else {} for name, s in seen.items()}
    muons = [name for name, s in seen.items() if "muon" in s.optimizer.lower() or "ns_steps" in groups[name]]
    embeddings = [name for name, s in seen.items() if s.module == "Embedding" or EMBEDDING.search(name)]
    matrices = [name for name, s in seen.items() if len(s.shape) > 1 and min(s.shape[-2:]) > 1]
    hidden = [name for name in matrices if name not in embeddings and not SMALL.search(name)]
    asked = muons or any("use_muon" in group for group in groups.values())
    none = asked and not any(v.kind == "muon" for v in judged.values())
    if none and not hidden:
        found["inactive", "Muon sees no matrix, only flat or one-dimensional parameters"] += list(seen)
    whole = [seen[name].optimizer for name, v in judged.items() if v.kind == "muon" and v.blocks == WHOLE]
    for name, v in judged.items():
        s, group, muon = seen[name], groups[name], v.kind == "muon"
        for code, text in v.wrong:
            found["undecided" if code == "per-shard" and s.optimizer in whole else code, text].append(name)
        wanted = name in hidden and (none or group.get("use_muon", name in muons))
        lr, decay = s.stated("lr") or 1.0, s.stated("weight_decay") or 0.0
        room = 0.1 * lr * decay + 8 * v.noise + 0.25 * torch.finfo(s.dtype).eps + 1e-9
        other = not v.wrong and min(abs(v.decay - lr * decay), abs(v.decay - decay)) > room
        # Cautious decay, averages of weights and changes after the step have other factors than none and twice, or are
        # no exact explanation.
        is_usual = decay and v.error < FITS and min(abs(v.decay), abs(v.decay - 2 * lr * decay)) < room
        decays = f"the group says weight_decay {decay:g}, and it is {v.decay / lr:.2g}"
        variant = f"a variant of Muon, whose own parts are not judged (error {v.error:.2f})"
        facts = (
            (v.scale < 0 and not group.get("maximize"), "sign", "the weight follows the gradient"),
            (wanted and v.kind == "adam", "inactive", "Adam trains it in place of Muon"),
            (wanted and v.kind == "sgd" and s.optimizer != "SGD", "sgd", SGD),
            (muon and v.error > 2 * FITS, "undecided", variant),
            (muon and name in embeddings, "embedding", "an embedding or output head is orthogonalized"),
            (muon and other, "decay" if is_usual else "undecided", decays),
        )
        for _, code, text in [fact for fact in facts if fact[0]][:1]:
            found[code, text].append(name)


def _check_sizes(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Found) -> dict[str, str]:
    """Rules of the update's size by name. Find those of a shard, or of exchanged rows and columns."""
    rules, exact = dict[str, str](), defaultdict[str, dict[str, float]](dict)
    for name, v in judged.items():
        whole = v.kind == "muon" and v.blocks == WHOLE and len(seen[name].shape) == 2
        if whole and not v.wrong and v.error < 2 * FITS:
            exact[seen[name].optimizer][name] = v.scale / (seen[name].stated("lr") or 1.0)
    for scales in exact.values():
        views: dict[str, Any] = {"": lambda m, n: (m, n), "exchanged rows and columns": lambda m, n: (n, m)}
        for r, c in seen[next(iter(scales))].shards:
            views[f"one of {r} x {c} shards"] = lambda m, n, r=r, c=c: (m / r, n / c)
        for (view, sides), (rule, size) in product(views.items(), RULES.items()):
            if all(abs(scale / size(*sides(*seen[name].shape)) - 1) < 0.08 for name, scale in scales.items()):
                rules |= dict.fromkeys(scales, "" if view else rule)
                if view:
                    found["scale", f"the size of the update is that of {view}"] += scales
                break
    return rules


def differences(paths: Sequence[Path], everyone: Sequence[Mapping[str, Seen]]) -> Found:
    """Weights and states that differ from the loaded checkpoint with the fewest differences, by the digests beside it.

    A run that starts with no state at all loaded the weights only.
    """
    results, tables = list[Found](), [{name: s.loaded for name, s in part.items()} for part in everyone]
    restored = any(len(states) > 1 for table in tables for states in table.values())
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
                found["undecided", f"{path.name} has digests of a part of {key}"].append(name)
            elif abs(old[0] - new[0]) > 0.01 * max(old[1], new[1]) ** 0.5:
                found["resume" if restored else "undecided", f"{key} is not that of {path.name}"].append(name)
        # Other files, as of data, say nothing.
        results += [found] if saved else []
    return min(results, key=lambda found: sum(code != "undecided" for code, _ in found), default=defaultdict(list))
