"""Findings, undecided names and a table by role."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .judge import FITS, Verdict

REMEDIES: Mapping[str, str] = {
    "sgd": "look for the call of Newton-Schulz, and for the condition that skips it",
    "inactive": "look at the rule that gives matrices to Muon: flat, empty and sharded shapes are no matrices",
    "per-micro-batch": "orthogonalize once a step, after the last backward pass",
    "micro-momentum": "update the momentum once a step, after the last backward pass",
    "per-shard": "gather the matrix before Newton-Schulz; allow this code for heads or MuonBP",
    "nesterov": "pass the option on to the update",
    "momentum": "pass the option on to the update",
    "coupled-decay": "multiply the weight by 1 - lr * weight_decay, and leave the gradient as it is",
    "decay": "multiply the weight by 1 - lr * weight_decay in each step, once",
    "twice": "orthogonalize once, with the intended number of steps",
    "scale": "take rows and columns of the whole matrix, as nn.Linear stores it: (out, in)",
    "embedding": "give embeddings and output heads to AdamW",
    "still": "look for a step that is skipped, a copy that is trained in its place, or an update that is not written back",
    "nobody": "give the parameter to an optimizer, or set requires_grad to False",
    "replicas": "reduce gradients before the step, and start all ranks from equal weights",
    "resume": "load weights and states after the last call that sets them, and into the same names",
}
"""The codes of findings, with remedies."""
EMBEDDING = re.compile(r"(^|\.)(wte|wpe|\w*embed\w*|lm_head|head|output|unembed\w*|classifier|score)\.weight$")
SMALL = re.compile(r"router|(^|\.)gate\.weight|norm")
RULES: Mapping[str, Any] = {
    "1": lambda m, n: 1.0,
    "sqrt(max(1, m/n))": lambda m, n: max(1.0, m / n) ** 0.5,
    "0.2 sqrt(max(m, n))": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "sqrt(m/n)": lambda m, n: (m / n) ** 0.5,
}
STATED: Mapping[str, str] = {"original": "sqrt(max(1, m/n))", "match_rms_adamw": "0.2 sqrt(max(m, n))"}


@dataclass
class Seen:
    """A parameter on a rank, as the ranks exchange it. `digests` has one entry for each audited step, and the last after."""

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    replicated: bool
    optimizer: str = ""
    group: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    region: str = ""
    numel: int = 0
    digests: list[float] = field(default_factory=list)
    gradient: bool = False
    captured: bool = False
    shards: tuple[tuple[int, int], ...] = ()
    undecided: str = ""

    @property
    def embedding(self) -> bool:
        return self.module == "Embedding" or bool(EMBEDDING.search(self.name))

    @property
    def hidden(self) -> bool:
        """Whether Muon is meant for it: a matrix, or a stack of matrices, inside of the model."""
        matrix = len(self.shape) > 1 and min(self.shape[-2:]) > 1
        return matrix and not self.embedding and not SMALL.search(self.name)

    @property
    def for_muon(self) -> bool:
        keys = self.group.get("use_muon", "ns_steps" in self.group or "muon" in self.optimizer.lower())
        return self.hidden and bool(keys)


@dataclass(frozen=True)
class Finding:
    """A finding: its code, the names and the evidence."""

    code: str
    names: str
    evidence: str
    allowed: bool = False

    def __str__(self) -> str:
        mark = "allowed" if self.allowed else "FINDING"
        return f"{mark} {self.code}: {self.names}: {self.evidence}; {REMEDIES[self.code]}"


@dataclass(frozen=True)
class Report:
    """The result of an audit. `undecided` has names and reasons."""

    findings: tuple[Finding, ...] = ()
    undecided: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    table: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0

    @property
    def codes(self) -> list[str]:
        """Codes of the findings that are not allowed, without repetition."""
        return list(dict.fromkeys(f.code for f in self.findings if not f.allowed))

    def __str__(self) -> str:
        head = f"{'role':<36}{'count':>6} {'shape':<14}{'optimizer':<14}{'update':<10}{'error':>6} {'scale':<20}{'decay':>9} momentum  blocks"
        lines = [head] if self.table else []
        for row in self.table:
            shape = "x".join(map(str, row["shape"]))
            lines.append(
                f"{row['role'][:35]:<36}{row['count']:>6} {shape:<14}{row['optimizer'][:13]:<14}{row['update']:<10}"
                f"{row['error']:>6.3f} {row['scale']:<20}{row['decay']:>9.2g} {row['momentum']:<9} {row['blocks']}"
            )
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"undecided: {names}: {reason}" for names, reason in self.undecided]
        lines += map(str, self.findings)
        count = sum(not f.allowed for f in self.findings)
        return "\n".join([*lines, f"{count} finding{'s' * (count != 1)}, audited in {self.seconds:.1f} s"])


def role_of(name: str) -> str:
    """A name without its numbers, which the layers of a model share."""
    return re.sub(r"\d+", "*", name)


def conclude(everyone: Sequence[Mapping[str, Seen]], verdicts: Mapping[str, Verdict], resumed: Sequence[tuple[str, str, str]],
             classes: Sequence[str], missing: Sequence[int], allow: Sequence[str], seconds: float) -> Report:  # fmt: skip
    """The report from the observations of all ranks and the verdicts on sampled parameters."""
    used = {name for part in everyone for name, s in part.items() if s.gradient or s.optimizer}
    seen = {name: s for part in reversed(everyone) for name, s in part.items() if name in used}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    unsure: dict[str, list[str]] = defaultdict(list)
    notes = list[str]()
    for name, code, evidence in resumed:
        (found[code, evidence] if code else unsure[evidence]).append(name)
    for name, s in seen.items():
        if s.undecided:
            unsure[s.undecided].append(name)
        parts = {rank: part[name] for rank, part in enumerate(everyone) if name in part}
        _replicas(name, parts, found, unsure)
        moved = any(len(set(p.digests)) > 1 for p in parts.values())
        if any(p.gradient for p in parts.values()) and not moved and len(s.digests) > 1:
            low = s.dtype != "torch.float32" and len(s.shape) < 2
            evidence = "has a gradient and does not move"
            if low:
                unsure[f"{evidence}: the rounding of {s.dtype} may hide its steps"].append(name)
            elif s.optimizer:
                found["still", evidence].append(name)
            else:
                found["nobody", "has a gradient, does not move, and is in no optimizer"].append(name)
    drifted = {name for (code, _), names in found.items() if code == "replicas" for name in names}
    judged = {n: v for n, v in verdicts.items() if n in seen and n not in drifted}
    _kinds(seen, judged, classes, found, unsure)
    rules = _scales(seen, judged, found)
    if missing:
        notes.append(f"ranks {', '.join(map(str, missing))} did not come to the comparison: each rank is judged apart")
    if not seen:
        notes.append("no step of a torch.optim.Optimizer was seen")
    findings = []
    for (code, evidence), names in found.items():
        allowed = any(
            a.split(":")[0] == code and all(fnmatch.fnmatch(n, (a + ":*").split(":")[1]) for n in names) for a in allow
        )
        findings.append(Finding(code, short(names, seen), evidence, allowed))
    undecided = tuple((short(names, seen), reason) for reason, names in unsure.items())
    return Report(tuple(findings), undecided, tuple(notes), _table(seen, judged, rules), seconds)


def _replicas(name: str, parts: Mapping[int, Seen], found: Any, unsure: Any) -> None:
    """Pieces of one region must stay equal on all ranks."""
    regions: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for rank, part in parts.items():
        regions[part.region][rank] = part.digests
    for held in regions.values():
        steps = min(map(len, held.values()))
        unequal = next((i for i in range(steps) if len({d[i] for d in held.values()}) > 1), None)
        if unequal == 0 and not next(iter(parts.values())).replicated:
            unsure["other values on each rank from the first step: pieces of one matrix, or unequal replicas"].append(
                name
            )
        elif unequal is not None:
            values = [d[unequal] for d in held.values()]
            odd = [str(r) for r, d in held.items() if d[unequal] != max(values, key=values.count)]
            found["replicas", f"rank {', '.join(odd)} has other values before step {unequal + 1}"].append(name)
            return


def _kinds(
    seen: Mapping[str, Seen], judged: Mapping[str, Verdict], classes: Sequence[str], found: Any, unsure: Any
) -> None:
    muon = [n for n, v in judged.items() if v.kind == "muon"]
    hidden = [n for n, s in seen.items() if s.hidden]
    asked = any("muon" in c.lower() for c in classes) or any(s.for_muon or "use_muon" in s.group for s in seen.values())
    if asked and not muon:
        adam = [n for n in hidden if n in judged and judged[n].kind == "adam"]
        if seen and not hidden:
            found["inactive", "Muon sees no matrix, only flat or one-dimensional parameters"] += list(seen)
        elif adam and len(adam) == sum(n in judged for n in hidden):
            found["inactive", "every hidden matrix is trained by Adam"] += adam
    for name, v in judged.items():
        s = seen[name]
        if v.kind == "undecided":
            unsure[v.undecided].append(name)
        elif v.kind == "sgd" and s.hidden and s.optimizer != "SGD" and (s.for_muon or asked and not muon):
            found["sgd", f"the step is a sum of gradients (error {v.error:.3f}), and Newton-Schulz never ran"].append(
                name
            )
        elif v.kind == "adam" and s.for_muon and muon:
            found["inactive", "its group is Muon's, and Adam trains it"].append(name)
        elif v.kind == "muon":
            for code, text in v.wrong:
                found[code, text].append(name)
            if s.embedding:
                found["embedding", "an embedding or output head is orthogonalized"].append(name)
            if v.error > FITS * 2:
                unsure[f"a variant of Muon: its own parts are not judged (error {v.error:.2f})"].append(name)
            lr, stated = float(s.group.get("lr", 0.0)), float(s.group.get("weight_decay", 0.0) or 0.0)
            room = 0.1 * lr * stated + 8 * v.noise + 0.25 * torch.finfo(getattr(torch, s.dtype[6:])).eps + 1e-9
            if s.optimizer and abs(v.decay - lr * stated) > room and not v.wrong and abs(v.decay - stated) > room:
                size = f"{v.decay / lr:.2g}" if abs(v.decay) > 0.1 * lr * stated else "missing"
                found["decay", f"the group says weight_decay {stated:g}, and it is {size}"].append(name)


def _scales(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Any) -> dict[str, str]:
    """Rule of the update's size, by name; findings for rules of a shard, of swapped rows and columns, or not stated."""
    groups: dict[Any, dict[str, tuple[int, int, float]]] = defaultdict(dict)
    for name, v in judged.items():
        s = seen[name]
        if (
            v.kind == "muon"
            and v.error < FITS * 2
            and not v.wrong
            and v.blocks == (1, 1)
            and s.optimizer
            and len(s.shape) == 2
        ):
            shape = s.shape[::-1] if s.module == "Conv1D" else s.shape
            groups[s.optimizer, s.number][name] = (*shape, v.scale / float(s.group["lr"]))
    rules = dict[str, str]()
    for members in groups.values():
        s = seen[next(iter(members))]
        wrong = [("that of exchanged rows and columns", lambda m, n, f=f: f(n, m)) for f in RULES.values()]
        for r, c in s.shards:
            text = f"that of a shard of {r * c}, not of the whole matrix"
            wrong += [(text, lambda m, n, r=r, c=c, f=f: f(m / r, n / c)) for f in RULES.values()]

        def fits(rule: Any, members: Any = members) -> bool:
            return all(abs(size / rule(m, n) - 1) < 0.08 for m, n, size in members.values())

        right = [text for text, rule in RULES.items() if fits(rule)]
        says = s.group.get("adjust_lr_fn", "?")
        want = STATED.get("original" if says is None else says) if says is None or isinstance(says, str) else None
        if right and (want is None or want in right):
            rules |= dict.fromkeys(members, right[0] if want is None else want)
        elif right:
            found["scale", f"the size of the update is {right[0]}, and the group says {want}"] += list(members)
        else:
            for text in [text for text, rule in wrong if fits(rule)][:1]:
                found["scale", f"the size of the update is {text}"] += list(members)
    return rules


def _table(
    seen: Mapping[str, Seen], judged: Mapping[str, Verdict], rules: Mapping[str, str]
) -> tuple[dict[str, Any], ...]:
    rows: dict[Any, list[str]] = defaultdict(list)
    for name, s in seen.items():
        rows[role_of(name), s.shape, s.optimizer].append(name)
    table = []
    for (role, shape, optimizer), names in rows.items():
        name = next((n for n in names if n in judged), names[0])
        v = judged.get(name, Verdict("not sampled"))
        momentum = "" if v.momentum is None else f"{v.momentum:.3g}{' n' if v.nesterov else ''}"
        lr = float(seen[name].group.get("lr", 0.0)) or 1.0
        table.append({"role": role, "count": len(names), "shape": shape, "optimizer": optimizer or "-", "update": v.kind, "error": round(v.error, 4),
                      "scale": rules.get(name, f"{v.scale / lr:.3g}"), "decay": v.decay / lr, "momentum": momentum,
                      "blocks": "whole" if v.blocks == (1, 1) else f"{v.blocks[0]} x {v.blocks[1]}", "spectrum": v.spectrum})  # fmt: skip
    return tuple(table)


def short(names: Sequence[str], seen: Mapping[str, Seen]) -> str:
    """Names by role, each with the number of its parameters."""
    if len(names) == 1 and sum(role_of(n) == role_of(names[0]) for n in seen) == 1:
        return names[0]
    roles = list(dict.fromkeys(map(role_of, names)))
    counts = {role: sum(role_of(n) == role for n in seen) for role in roles}
    listed = ", ".join(f"{r} ({counts[r]})" if counts[r] > 1 else r for r in roles[:4])
    return listed + (f" and {len(roles) - 4} more roles" if len(roles) > 4 else "")
