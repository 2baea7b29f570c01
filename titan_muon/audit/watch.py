"""Watches the parameters of models and optimizers through PyTorch's hooks, for a few steps of each optimizer."""

from __future__ import annotations

import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .judge import Evidence, Gradient, Verdict, judge
from .ranks import Meeting, digest, held, local, region, whole
from .report import Report, Seen, conclude, role_of
from .resume import compare, record

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


@dataclass
class Watched:
    """A parameter on this rank. `steps` has the gradient before each step, and those of its backward passes."""

    parameter: Tensor
    seen: Seen
    sampled: bool = False
    passes: list[Tensor] = field(default_factory=list)
    steps: list[tuple[Tensor | None, list[Tensor]]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None


class Audit:
    """An audit of this process: `report` after the audited steps, or after `close`.

    Args: `steps` of each optimizer, `memory` in bytes for gradients on this rank, and `limit` in seconds for waits.
    """

    def __init__(self, steps: int = 4, memory: float = 2**31, limit: float = 60.0, allow: Iterable[str] = ()) -> None:
        self.steps, self.limit, self.allow, self._room = steps, limit, tuple(allow), memory
        self.report: Report | None = None
        self._seconds = 0.0
        self._optimizers: dict[Optimizer, int] = {}  # with their steps so far
        self._watched: dict[Tensor, Watched] = {}
        self._outer: Optimizer | None = None
        self._roles, self._names = set[tuple[Any, ...]](), set[str]()
        self._loaded, self._tables, self._restored = list[str](), None, False
        self._undo, self._undo_saves = list[Callable[[], Any]](), list[Callable[[], Any]]()
        self._meeting: Meeting | None = None
        self.alive: object = None

    # Hooks

    def open(self, *models: nn.Module) -> None:
        """Begin to watch: the parameters of `models`, or those of all modules once an optimizer is made."""
        self._undo += [h.remove for h in (register_optimizer_step_pre_hook(self._before),)]
        self._undo += [h.remove for h in (register_optimizer_step_post_hook(self._after),)]
        self._replace(Optimizer, "__init__", lambda result, optimizer, *_, **__: self._adopt(optimizer))
        self._replace(Optimizer, "load_state_dict", lambda *_, **__: setattr(self, "_restored", True))
        import torch.distributed.checkpoint as dcp

        for module, first in ((torch, 1), (dcp, 1)):
            saved = lambda *a, first=first, **k: self._file(a[first + 1 :], k, self._record)  # noqa: E731
            self._replace(module, "save", saved, self._undo_saves)
            loaded = lambda *a, m=module, **k: self._file(a[1 + (m is dcp) :], k, self._loaded.append)  # noqa: E731
            self._replace(module, "load", loaded)
        self._replace(dist, "destroy_process_group", lambda *_, **__: None, before=self.finish)
        if models:
            self._survey(models)

    def _replace(
        self, owner: Any, name: str, then: Callable[..., Any], undo: list[Any] | None = None, before: Any = None
    ) -> None:
        """Let calls of `owner.name` be followed by `then(result, *arguments)`."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = original(*args, **kwargs)
            then(result, *args, **kwargs)
            return result

        call.__doc__, call.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
        setattr(owner, name, call)
        (self._undo if undo is None else undo).append(lambda: setattr(owner, name, original))

    def _file(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], use: Callable[[str], Any]) -> None:
        for place in (kwargs.get("checkpoint_id"), kwargs.get("f"), *args[:1]):
            if isinstance(place, str | Path):
                return use(str(place))

    def _survey(self, models: Iterable[nn.Module]) -> None:
        """Watch the trainable parameters of these modules and of their wrappers, by name."""
        models = list(models)
        inner = {child for module in models for child in module.children()}
        for root in (module for module in models if module not in inner):
            for prefix, module in root.named_modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        full = WRAPPERS.sub("", f".{prefix}.{name}").strip(".")
                        self._watch(parameter, full, type(module).__name__, type(root).__name__)

    def _watch(self, parameter: Tensor, name: str, module: str, root: str) -> None:
        if parameter in self._watched:
            return
        while name in self._names:
            name += "'"
        self._names.add(name)
        replicated = root == "DistributedDataParallel" or isinstance(parameter, DTensor)
        seen = Seen(name, module, tuple(parameter.shape), str(parameter.dtype), replicated)
        watched = self._watched[parameter] = Watched(parameter, seen)
        role = role_of(name), seen.shape
        if role in self._roles or not parameter.is_leaf or not parameter.is_floating_point():
            return
        need = 4 * local(parameter).numel() * (2 * self.steps + 2)
        if need > self._room:
            seen.undecided = "larger than the memory limit of the audit"
            return
        self._room -= need
        self._roles.add(role)
        watched.sampled = True
        if isinstance(parameter, DTensor):  # FSDP2 calls these hooks after its reduction.
            hook = parameter.register_post_accumulate_grad_hook(lambda p: self._keep(watched, p.grad))
        else:
            hook = parameter.register_hook(lambda gradient: self._keep(watched, gradient))
        self._undo.append(hook.remove)

    def _keep(self, watched: Watched, gradient: Tensor | None) -> None:
        if gradient is None or gradient.is_sparse:
            return
        piece = local(gradient).float().clone()
        if isinstance(watched.parameter, DTensor):
            for earlier in watched.passes:
                piece -= earlier
        # Of many passes, the last entry has the sum of the rest.
        if len(watched.passes) < 8:
            watched.passes.append(piece)
        else:
            watched.passes[-1] += piece

    def _adopt(self, optimizer: Optimizer) -> None:
        """Watch the parameters of a new optimizer."""
        if optimizer in self._optimizers:
            return
        self._optimizers[optimizer] = 0
        parameters = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        if any(p not in self._watched for _, p in parameters):
            self._survey([o for o in gc.get_objects() if issubclass(type(o), nn.Module)])
        for i, (number, parameter) in enumerate(parameters):
            names = optimizer.param_groups[number].get("param_names")
            self._watch(parameter, names[i] if names and len(names) > i else f"group{number}.{i}", "", "")

    # Steps

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._outer is not None and self._outer is not optimizer:
            return
        self._outer = optimizer
        begin = time.perf_counter()
        self._adopt(optimizer)
        # A step without a rate only makes states, in torch.distributed's get_optimizer_state_dict.
        if any(float(group["lr"]) for group in optimizer.param_groups):
            self._meeting = self._meeting or Meeting(self.limit)
            if self._tables is None and self._loaded:
                self._tables = self._table()
            watched = self._of(optimizer)
            if (count := self._optimizers[optimizer]) < self.steps:
                for group, w in watched:
                    self._tick(w, optimizer, group)
            else:
                self._capture(w for _, w in watched)
            self._optimizers[optimizer] = count + 1
            counts = [n for n in self._optimizers.values() if n]
            if min(counts) > self.steps or count > 2 * self.steps:
                self.finish()
        self._seconds += time.perf_counter() - begin

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._outer is optimizer:
            self._outer = None

    def _of(self, optimizer: Optimizer) -> list[tuple[Mapping[str, Any], Watched]]:
        """The optimizer's parameters, and for the first optimizer those that are in none, with their groups."""
        mine = [
            (group, self._watched[p]) for group in optimizer.param_groups for p in group["params"] if p in self._watched
        ]
        stepping = [o for o, count in self._optimizers.items() if count] or [optimizer]
        if optimizer is stepping[0]:
            taken = {p for o in self._optimizers for group in o.param_groups for p in group["params"]}
            rest = [w for p, w in self._watched.items() if p not in taken]
            mine += [(optimizer.param_groups[0], w) for w in rest]
        return mine

    def _tick(self, w: Watched, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Record a parameter before a step."""
        p, seen = w.parameter, w.seen
        if (dims := held(p)) is None:
            return
        members = [q for g in optimizer.param_groups for q in g["params"]]
        seen.optimizer = type(optimizer).__name__ if any(p is q for q in members) else ""
        seen.group = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        seen.group = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in seen.group.items()}
        seen.number = next((i for i, g in enumerate(optimizer.param_groups) if g is group), 0)
        seen.region, seen.numel = region(dims), local(p).numel()
        seen.digests.append(digest(p, dims)[0])
        gradient = p.grad
        seen.gradient |= bool(w.passes) or gradient is not None and bool(local(gradient).any())
        if isinstance(p, DTensor):
            counts = [
                p.device_mesh.size(i) for i, x in enumerate(p.placements) if getattr(x, "dim", None) == p.ndim - 2
            ]
            columns = [
                p.device_mesh.size(i) for i, x in enumerate(p.placements) if getattr(x, "dim", None) == p.ndim - 1
            ]
            seen.shards = tuple((n, 1) for n in counts if n > 1) + tuple((1, n) for n in columns if n > 1)
        elif self._meeting is not None and self._meeting.size > 1:
            seen.shards = ((self._meeting.size, 1), (1, self._meeting.size))
        if w.sampled:
            if not w.groups:
                states = optimizer.state.get(p, {}).items()
                same = {k: v for k, v in states if isinstance(v, Tensor) and (v.shape == p.shape or not v.ndim)}
                w.start = {k: local(v).float().clone() for k, v in same.items()}
            w.groups.append(seen.group)
            w.steps.append((None if gradient is None else local(gradient).float().clone(), w.passes))
            w.before = local(p).clone()
            w.passes = []

    def _capture(self, watched: Iterable[Watched]) -> None:
        """Record parameters before the first step that is not audited, with updates that came in a forward pass."""
        for w in watched:
            if w.seen.digests and not w.seen.captured and (dims := held(w.parameter)) is not None:
                w.seen.captured = True
                w.seen.digests.append(digest(w.parameter, dims)[0])
                w.after = local(w.parameter).clone() if w.sampled else None

    # Checkpoints

    def _table(self) -> dict[str, dict[str, tuple[str, float, float, int]]]:
        """Digests of weights and optimizer states on this rank, by name and state."""
        table: dict[str, dict[str, tuple[str, float, float, int]]] = {}
        for p, w in self._watched.items():
            if (dims := held(p)) is not None:
                states = [v for o in self._optimizers for k, v in o.state.items() if k is p]
                tensors = {k: v for state in states for k, v in state.items() if isinstance(v, Tensor)}
                named = {"weight": p, **{k: v for k, v in tensors.items() if v.shape == p.shape and v.ndim}}
                size = local(p).numel()
                table[w.seen.name] = {
                    k: (region(dims), *digest(v, dims), size) for k, v in named.items() if local(v).numel() == size
                }
        return table

    @torch.no_grad()
    def _record(self, path: str) -> None:
        if self._optimizers:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            record(path, rank, self._table())

    # Conclusions

    def close(self) -> None:
        """Conclude if the steps were fewer than asked for, and remove all hooks."""
        try:
            self.finish()
        finally:
            for undo in (*reversed(self._undo), *reversed(self._undo_saves)):
                undo()

    @property
    def first(self) -> bool:
        """Whether this rank shows the report."""
        return self._meeting is None or self._meeting.rank == 0

    def leave(self) -> None:
        """Wait for the other ranks, because the launcher ends them with the first rank that fails."""
        if self._meeting is not None and self._meeting.size > 1:
            self._meeting.come("end")

    @torch.no_grad()
    def finish(self) -> None:
        """Compare the ranks, judge the last step, and remove the hooks of steps and gradients."""
        if self.report is not None:
            return
        begin = time.perf_counter()
        while self._undo:
            self._undo.pop()()
        self._capture(self._watched.values())
        meeting = self._meeting = self._meeting or Meeting(self.limit)
        together = meeting.come("finish")
        if not together:
            meeting.size, meeting.rank = 1, 0
        mine = {w.seen.name: w.seen for w in self._watched.values() if w.seen.region}
        tables = meeting.gather(0, (mine, self._tables or {}))
        everyone = [seen for seen, _ in tables]
        sampled = {w.seen.name: w for w in self._watched.values() if w.sampled and w.before is not None}
        names = sorted({n for part in meeting.gather(0, list(sampled)) for n in part})
        evidence: dict[str, Evidence] = {}
        for index, name in enumerate(meeting.tell("names", names)):
            judge_rank = index % meeting.size
            pieces = meeting.gather(judge_rank, _pieces(sampled.get(name)))
            if pieces and (found := _evidence([p for p in pieces if p is not None])) is not None:
                evidence[name] = found
        self._watched = {p: Watched(p, w.seen) for p, w in self._watched.items()}  # frees gradients
        verdicts = {name: judge(e) for name, e in evidence.items()}
        verdicts = {n: v for part in meeting.gather(0, verdicts) for n, v in part.items()}
        report = None
        if meeting.rank == 0:
            resumed = compare(self._loaded, [t for _, t in tables], self._restored) if self._tables else []
            classes = [type(o).__name__ for o in self._optimizers]
            seconds = self._seconds + time.perf_counter() - begin
            report = conclude(everyone, verdicts, resumed, classes, meeting.missing, self.allow, seconds)
        self.report = meeting.tell("report", report)


def _pieces(w: Watched | None) -> tuple[Any, ...] | None:
    """A rank's observations of a parameter, for another rank."""
    if w is None or (dims := held(w.parameter)) is None or w.before is None:
        return None
    kept = {k: v for k, v in w.start.items() if v.ndim or k == "step"}
    return dims, tuple(w.parameter.shape), w.before, w.after, w.steps, w.groups, kept, w.seen


def _evidence(pieces: list[tuple[Any, ...]]) -> Evidence | None:
    """Whole matrices from the pieces of all ranks; None where a piece is missing."""
    _, shape, _, _, steps, groups, start, seen = pieces[0]

    def joined(get: Callable[[tuple[Any, ...]], Tensor]) -> Tensor | None:
        return whole(shape, [(piece[0], get(piece)) for piece in pieces])

    before, after = joined(lambda x: x[2]), joined(lambda x: x[3])
    if before is None or after is None:
        return None
    gradients = list[Gradient]()
    for i, (gradient, passes) in enumerate(steps):
        alike = len({len(piece[4][i][1]) for piece in pieces}) == 1
        parts = [joined(lambda x, i=i, k=k: x[4][i][1][k]) for k in range(len(passes))] if alike else []
        total = None if gradient is None else joined(lambda x, i=i: x[4][i][0])
        gradients += _of_step(i, total, [part for part in parts if part is not None])
    states = {k: v if not v.ndim else joined(lambda x, k=k: x[6][k]) for k, v in start.items()}
    dtype = getattr(torch, seen.dtype.split(".")[1])
    states = {k: v for k, v in states.items() if v is not None}
    return Evidence(before, after, gradients, groups, states, torch.finfo(dtype).eps, seen.shards)


def _of_step(step: int, total: Tensor | None, passes: list[Tensor]) -> list[Gradient]:
    """The gradients of a step's backward passes in the units of the step, or their sum if nothing tells them apart."""
    if not passes:
        return [] if total is None else [Gradient(step, total)]
    if total is None or total.shape != passes[0].shape:
        return [Gradient(step, part) for part in passes]
    summed = sum(passes[1:], passes[0])
    scale = float((summed * total).sum() / (summed * summed).sum().clamp(min=1e-30))
    alike = float((summed * scale - total).norm()) < 0.15 * float(total.norm())
    # Otherwise the gradient was changed after backward, as by Newton-Schulz in a hook.
    return [Gradient(step, part * (scale if alike else 1.0)) for part in passes]


@contextmanager
def watch(*models: nn.Module, steps: int = 4, allow: Iterable[str] = ()) -> Iterator[Audit]:
    """Audit the steps of all optimizers in the context; `report` of the yielded audit has the findings at its end.

    Enter the context before the first backward pass, so that the audit sees every gradient.

    Args:
        models: trainable modules; by default all modules that exist when an optimizer is made or steps.
        steps: audited steps of each optimizer.
        allow: codes of findings that are not counted, each with `:PATTERN` for some names only.
    """
    audit = Audit(steps, allow=allow)
    audit.open(*models)
    try:
        yield audit
    except BaseException:
        audit.report = Report()
        raise
    finally:
        audit.close()
