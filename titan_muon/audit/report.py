"""Findings, undecided names and a table by role."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoints import Found
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


@dataclass(frozen=True)
class Finding:
    """A finding: code, names by role, and evidence."""

    code: str
    names: str
    evidence: str
    allowed: bool

    def __str__(self) -> str:
        mark = "allowed" if self.allowed else "FINDING"
        return f"{mark} {self.code}: {self.names}: {self.evidence}; {REMEDIES[self.code]}"


@dataclass(frozen=True)
class Report:
    """The result of an audit. `undecided` has names and reasons; `table` has a row for each role."""

    findings: tuple[Finding, ...] = ()
    undecided: tuple[tuple[str, str], ...] = ()
    table: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0

    @property
    def codes(self) -> list[str]:
        """Codes of the findings that are not allowed, each once."""
        return list(dict.fromkeys(f.code for f in self.findings if not f.allowed))

    def __str__(self) -> str:
        rows = [[*self.table[0]], *([str(x) for x in row.values()] for row in self.table)] if self.table else []
        sizes = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        table = ["".join(x.ljust(n) for x, n in zip(row, sizes, strict=True)).rstrip() for row in rows]
        undecided = [f"undecided: {names}: {reason}" for names, reason in self.undecided]
        count = sum(not f.allowed for f in self.findings)
        last = f"{count} finding{'s' * (count != 1)}, audited in {self.seconds:.1f} s"
        return "\n".join([*table, *undecided, *map(str, self.findings), last])


def role_of(name: str) -> str:
    """A name without its numbers, which the layers of a model share."""
    return re.sub(r"\d+", "*", name)


def is_embedding(seen: Seen) -> bool:
    """Whether a parameter is an embedding or an output head."""
    return seen.module == "Embedding" or bool(EMBEDDING.search(seen.name))


def is_hidden(seen: Seen) -> bool:
    """Whether a parameter is a matrix or a stack of matrices inside of the model."""
    matrix = len(seen.shape) > 1 and min(seen.shape[-2:]) > 1
    return matrix and not is_embedding(seen) and not SMALL.search(seen.name)


def conclude(everyone: Sequence[Mapping[str, Seen]], verdicts: Mapping[str, Verdict], found: Found,
             allow: Iterable[str], seconds: float) -> Report:  # fmt: skip
    """The report from the observations of all ranks, the verdicts on sampled parameters, and findings so far."""
    used = {name for part in everyone for name, s in part.items() if s.gradient or s.optimizer or s.undecided}
    seen = {name: s for part in reversed(everyone) for name, s in part.items() if name in used}
    for name in seen:
        _ranks(name, {rank: part[name] for rank, part in enumerate(everyone) if name in part}, found)
    drifted = [name for (code, _), names in found.items() if code == "replicas" for name in names]
    judged = {name: v for name, v in verdicts.items() if name in seen and name not in drifted}
    _kinds(seen, judged, found)
    rules = _scales(seen, judged, found)
    members, roles = defaultdict[str, list[str]](list), dict[Any, list[str]]()
    for name, s in seen.items():
        members[role_of(name)].append(name)
        roles.setdefault((role_of(name), s.shape, s.optimizer), []).append(name)

    def names_of(names: Sequence[str]) -> str:
        named = [members[role] for role in members if any(role_of(name) == role for name in names)]
        listed = [f"{role_of(m[0])} ({len(m)})" if len(m) > 1 else m[0] for m in named or [list(names)]]
        return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more roles" if len(listed) > 4 else "")

    def allowed(code: str, names: Sequence[str]) -> bool:
        patterns = [a.partition(":")[2] or "*" for a in allow if a.partition(":")[0] == code]
        return any(all(fnmatch.fnmatch(n, p) for n in names) for p in patterns)

    findings = [Finding(c, names_of(names), e, allowed(c, names)) for (c, e), names in found.items() if c]
    undecided = [(names_of(names), evidence) for (code, evidence), names in found.items() if not code]
    rows = list[dict[str, Any]]()
    for names in roles.values():
        name = next((n for n in names if n in judged), names[0])
        rows.append(_row(seen[name], judged.get(name, Verdict("not sampled")), len(names), rules.get(name)))
    return Report(tuple(findings), tuple(undecided), tuple(rows), seconds)


def _row(s: Seen, v: Verdict, count: int, rule: str | None) -> dict[str, Any]:
    return {
        "role": role_of(s.name),
        "count": count,
        "shape": "x".join(map(str, s.shape)),
        "optimizer": s.optimizer or "-",
        "update": v.kind,
        "error": f"{v.error:.4f}",
        "scale": rule or f"{v.scale / s.lr:.3g}",
        "decay": f"{v.decay / s.lr:.2g}",
        "momentum": "" if v.momentum is None else f"{v.momentum:.3g}{' n' if v.nesterov else ''}",
        "blocks": "whole" if v.blocks == WHOLE else "{} x {}".format(*v.blocks),
    }


def _ranks(name: str, parts: Mapping[int, Seen], found: Found) -> None:
    """Find pieces of one place that are not equal on all ranks, and parameters that do not move on any."""
    s = next(iter(parts.values()))
    if s.undecided:
        found["", s.undecided].append(name)
    moved = len(s.digests) < 2 or any(len(set(part.digests)) > 1 for part in parts.values())
    if any(part.gradient for part in parts.values()) and not moved:
        rounded = s.dtype != torch.float32 and len(s.shape) < 2
        code = "" if rounded else "still" if s.optimizer else "nobody"
        found[code, "has a gradient and does not move"].append(name)
    for place in dict.fromkeys(part.place for part in parts.values()):
        held = {rank: part.digests for rank, part in parts.items() if part.place == place}
        steps = zip(*held.values(), strict=False)
        step, values = next(((i, v) for i, v in enumerate(steps, start=1) if len(set(v)) > 1), (0, ()))
        if step == 1 and not s.replicated:
            text = "other values on each rank from the start: pieces of one matrix, or unequal replicas"
            found["", text].append(name)
        elif step:
            odd = [str(r) for r, value in zip(held, values, strict=True) if value != max(values, key=values.count)]
            found["replicas", f"rank {', '.join(odd)} has other values before step {step}"].append(name)
            return


def _kinds(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Found) -> None:
    """Find updates of another kind than the optimizer says."""
    asked = any("muon" in s.optimizer.lower() or {"use_muon", "ns_steps"} & s.group.keys() for s in seen.values())
    none = asked and not any(v.kind == "muon" for v in judged.values())
    if none and seen and not any(map(is_hidden, seen.values())):
        found["inactive", "Muon sees no matrix, only flat or one-dimensional parameters"] += list(seen)
    for name, v in judged.items():
        s = seen[name]
        says = "ns_steps" in s.group or "muon" in s.optimizer.lower()
        muon = is_hidden(s) and (none or bool(s.group.get("use_muon", says)))
        if v.undecided:
            found["", v.undecided].append(name)
        elif v.kind == "sgd" and muon and s.optimizer != "SGD":
            found["sgd", "the step is a sum of gradients: Newton-Schulz never ran"].append(name)
        elif v.kind == "adam" and muon:
            found["inactive", "Adam trains it in place of Muon"].append(name)
        elif v.kind == "muon":
            for wrong in v.wrong:
                found[wrong].append(name)
            if is_embedding(s):
                found["embedding", "an embedding or output head is orthogonalized"].append(name)
            if v.error > 2 * FITS:
                found["", f"a variant of Muon, whose own parts are not judged (error {v.error:.2f})"].append(name)
            room = 0.1 * s.lr * s.decay + 8 * v.noise + 0.25 * torch.finfo(s.dtype).eps + 1e-9
            if s.optimizer and not v.wrong and min(abs(v.decay - s.lr * s.decay), abs(v.decay - s.decay)) > room:
                size = f"{v.decay / s.lr:.2g}" if abs(v.decay) > 0.1 * s.lr * s.decay else "missing"
                found["decay", f"the group says weight_decay {s.decay:g}, and it is {size}"].append(name)


def _scales(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Found) -> dict[str, str]:
    """Rules of the update's size by name. Find those of a shard, or of exchanged rows and columns."""
    groups, rules = defaultdict[str, dict[str, tuple[int, int, float]]](dict), dict[str, str]()
    for name, v in judged.items():
        s = seen[name]
        plain = v.kind == "muon" and v.error < 2 * FITS and not v.wrong and v.blocks == WHOLE
        if plain and s.optimizer and len(s.shape) == 2:
            groups[s.optimizer][name] = *s.shape, v.scale / s.lr
    for members in groups.values():
        views: dict[str, Any] = {"": lambda m, n: (m, n), "exchanged rows and columns": lambda m, n: (n, m)}
        for r, c in seen[next(iter(members))].shards:
            views[f"one of {r} x {c} shards"] = lambda m, n, r=r, c=c: (m / r, n / c)
        fitting = [
            (view, rule)
            for view, side in views.items()
            for rule, size_of in RULES.items()
            if all(abs(size / size_of(*side(m, n)) - 1) < 0.08 for m, n, size in members.values())
        ]
        view, rule = next(iter(fitting), ("", ""))
        if view:
            found["scale", f"the size of the update is that of {view}"] += list(members)
        elif rule:
            rules |= dict.fromkeys(members, rule)
    return rules
