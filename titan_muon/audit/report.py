"""Findings, undecided names and a table by role."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .judge import FITS, WHOLE, Seen, Verdict
from .ranks import Found

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
        sizes = {
            "role": 36,
            "count": 6,
            "shape": 13,
            "optimizer": 14,
            "update": 11,
            "error": 8,
            "scale": 20,
            "decay": 9,
            "momentum": 9,
        }
        rows = [dict(zip(sizes, sizes, strict=True)) | {"blocks": "blocks"}, *self.table] if self.table else []
        lines = ["".join(str(row[k])[: n - 1].ljust(n) for k, n in sizes.items()) + row["blocks"] for row in rows]
        count = sum(not f.allowed for f in self.findings)
        lines += [f"undecided: {names}: {reason}" for names, reason in self.undecided]
        return "\n".join(
            [*lines, *map(str, self.findings), f"{count} finding{'s' * (count != 1)}, audited in {self.seconds:.1f} s"]
        )


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


def is_muon(seen: Seen) -> bool:
    """Whether its group or optimizer says that Muon trains it."""
    says = "ns_steps" in seen.group or "muon" in seen.optimizer.lower()
    return is_hidden(seen) and bool(seen.group.get("use_muon", says))


def conclude(everyone: Sequence[Mapping[str, Seen]], verdicts: Mapping[str, Verdict], found: Found,
             classes: Sequence[str], allow: Sequence[str], seconds: float) -> Report:  # fmt: skip
    """The report from the observations of all ranks, the verdicts on sampled parameters, and findings so far."""
    used = {name for part in everyone for name, s in part.items() if s.gradient or s.optimizer}
    seen = {name: s for part in reversed(everyone) for name, s in part.items() if name in used}
    for name, s in seen.items():
        parts = {rank: part[name] for rank, part in enumerate(everyone) if name in part}
        _ranks(name, parts, found)
        if s.undecided:
            found["", s.undecided].append(name)
        moved = len(s.digests) < 2 or any(len(set(part.digests)) > 1 for part in parts.values())
        if any(part.gradient for part in parts.values()) and not moved:
            code = "still" if s.optimizer else "nobody"
            rounded = s.dtype != torch.float32 and len(s.shape) < 2
            found["" if rounded else code, "has a gradient and does not move"].append(name)
    drifted = [name for (code, _), names in found.items() if code == "replicas" for name in names]
    judged = {name: v for name, v in verdicts.items() if name in seen and name not in drifted}
    _kinds(seen, judged, classes, found)
    rules = _scales(seen, judged, found)

    def names_of(names: Sequence[str]) -> str:
        roles = {
            role: [n for n in seen if role_of(n) == role]
            for role in dict.fromkeys(role_of(n) for n in [*seen, *names] if n in names)
        }
        listed = [f"{role} ({len(all_)})" if len(all_) > 1 else (all_ or names)[0] for role, all_ in roles.items()]
        return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more roles" if len(listed) > 4 else "")

    def allowed(code: str, names: Sequence[str]) -> bool:
        patterns = [a.partition(":")[2] or "*" for a in allow if a.partition(":")[0] == code]
        return any(all(fnmatch.fnmatch(n, p) for n in names) for p in patterns)

    findings = [Finding(c, names_of(names), e, allowed(c, names)) for (c, e), names in found.items() if c]
    undecided = [(names_of(names), evidence) for (code, evidence), names in found.items() if not code]
    rows = dict[Any, str]()
    for name, s in seen.items():
        role = role_of(name), s.shape, s.optimizer
        rows[role] = rows[role] if rows.get(role) in judged else name
    table = tuple(_row(seen, name, judged.get(name, Verdict("not sampled")), rules) for name in rows.values())
    return Report(tuple(findings), tuple(undecided), table, seconds)


def _row(seen: Mapping[str, Seen], name: str, v: Verdict, rules: Mapping[str, str]) -> dict[str, Any]:
    s = seen[name]
    lr = float(s.group.get("lr", 0.0)) or 1.0
    row = {
        "role": role_of(name),
        "count": sum((role_of(n), o.shape) == (role_of(name), s.shape) for n, o in seen.items()),
    }
    row |= {"shape": "x".join(map(str, s.shape)), "optimizer": s.optimizer or "-", "update": v.kind}
    row |= {"error": f"{v.error:.4f}", "scale": rules.get(name, f"{v.scale / lr:.3g}"), "decay": f"{v.decay / lr:.2g}"}
    row["momentum"] = "" if v.momentum is None else f"{v.momentum:.3g}{' n' if v.nesterov else ''}"
    return row | {"blocks": "whole" if v.blocks == WHOLE else "{} x {}".format(*v.blocks)}


def _ranks(name: str, parts: Mapping[int, Seen], found: Found) -> None:
    """Find pieces of one place that are not equal on all ranks."""
    for place in dict.fromkeys(part.place for part in parts.values()):
        held = {rank: part.digests for rank, part in parts.items() if part.place == place}
        steps = range(min(map(len, held.values())))
        unequal = next((i for i in steps if len({digests[i] for digests in held.values()}) > 1), None)
        if unequal == 0 and not next(iter(parts.values())).replicated:
            found["", "other values on each rank from the start: pieces of one matrix, or unequal replicas"].append(
                name
            )
        elif unequal is not None:
            values = [digests[unequal] for digests in held.values()]
            odd = [str(r) for r, digests in held.items() if digests[unequal] != max(values, key=values.count)]
            found["replicas", f"rank {', '.join(odd)} has other values before step {unequal + 1}"].append(name)
            return


def _kinds(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], classes: Sequence[str], found: Found) -> None:
    """Find updates of another kind than the optimizer says."""
    asked = any("muon" in c.lower() for c in classes) or any(is_muon(s) or "use_muon" in s.group for s in seen.values())
    hidden, none = [n for n, s in seen.items() if is_hidden(s)], not any(v.kind == "muon" for v in judged.values())
    if asked and none and seen and not hidden:
        found["inactive", "Muon sees no matrix, only flat or one-dimensional parameters"] += list(seen)
    for name, v in judged.items():
        s = seen[name]
        lr, stated = float(s.group.get("lr", 0.0)), float(s.group.get("weight_decay") or 0.0)
        if v.undecided:
            found["", v.undecided].append(name)
        elif v.kind == "sgd" and is_hidden(s) and s.optimizer != "SGD" and (is_muon(s) or (asked and none)):
            found["sgd", "the step is a sum of gradients: Newton-Schulz never ran"].append(name)
        elif v.kind == "adam" and is_hidden(s) and (is_muon(s) or (asked and none)):
            found["inactive", "Adam trains it in place of Muon"].append(name)
        elif v.kind == "muon":
            for wrong in v.wrong:
                found[wrong].append(name)
            if is_embedding(s):
                found["embedding", "an embedding or output head is orthogonalized"].append(name)
            if v.error > 2 * FITS:
                found["", f"a variant of Muon, whose own parts are not judged (error {v.error:.2f})"].append(name)
            room = 0.1 * lr * stated + 8 * v.noise + 0.25 * torch.finfo(s.dtype).eps + 1e-9
            if s.optimizer and not v.wrong and min(abs(v.decay - lr * stated), abs(v.decay - stated)) > room:
                size = f"{v.decay / lr:.2g}" if abs(v.decay) > 0.1 * lr * stated else "missing"
                found["decay", f"the group says weight_decay {stated:g}, and it is {size}"].append(name)


def _scales(seen: Mapping[str, Seen], judged: Mapping[str, Verdict], found: Found) -> dict[str, str]:
    """Rules of the update's size by name. Find those of a shard, or of exchanged rows and columns."""
    groups, rules = defaultdict[Any, dict[str, tuple[int, int, float]]](dict), dict[str, str]()
    for name, v in judged.items():
        s = seen[name]
        if (
            v.kind == "muon"
            and v.error < 2 * FITS
            and not v.wrong
            and v.blocks == WHOLE
            and s.optimizer
            and len(s.shape) == 2
        ):
            rows, cols = s.shape[::-1] if s.module == "Conv1D" else s.shape
            groups[s.optimizer, s.number][name] = rows, cols, v.scale / (float(s.group.get("lr", 0.0)) or 1.0)
    for members in groups.values():
        wrong: list[Any] = [("exchanged rows and columns", lambda m, n, f=f: f(n, m)) for f in RULES.values()]
        for r, c in seen[next(iter(members))].shards:
            wrong += [(f"a shard of {r * c}", lambda m, n, r=r, c=c, f=f: f(m / r, n / c)) for f in RULES.values()]
        right, bad = (
            [t for t, f in rules_ if all(abs(size / f(m, n) - 1) < 0.08 for m, n, size in members.values())]
            for rules_ in (RULES.items(), wrong)
        )
        if right:
            rules |= dict.fromkeys(members, right[0])
        elif bad:
            found["scale", f"the size of the update is that of {bad[0]}"] += list(members)
    return rules
