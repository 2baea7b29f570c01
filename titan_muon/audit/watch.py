"""Watches the parameters of models and optimizers through PyTorch's hooks, for a few steps of each optimizer."""

import gc
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .judge import Evidence, Seen, judge
from .ranks import Meeting, differences, digest, held, local, whole
from .report import Report, conclude, role_of

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
MOST_PASSES = 8


class Audit:
    """An audit of this process. `report` is set after the audited steps, or by `close`.

    Args: `steps` of each optimizer, `memory` in bytes for sampled tensors of this rank, `limit` in seconds for waits.
    """

    def __init__(self, steps: int = 4, memory: float = 2**31, limit: float = 60.0, allow: Iterable[str] = ()) -> None:
        self.steps, self.limit, self.allow, self._room = steps, limit, tuple(allow), memory
        self.report: Report | None = None
        self.alive: object = None
        self._meeting: Meeting | None = None
        self._outer: Optimizer | None = None
        self._table: dict[str, Any] | None = None
        self._seconds, self._restored, self._loaded = 0.0, False, list[str]()
        self._counts: dict[Optimizer, int] = {}
        self._seen: dict[Tensor, Seen] = {}
        self._undo, self._undo_saves = list[Callable[[], Any]](), list[Callable[[], Any]]()

    def open(self, *models: nn.Module) -> None:
        """Watch the parameters of `models`, or by default of all modules that exist when an optimizer is made."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        self._undo += [hook.remove for hook in hooks]
        self._follow(Optimizer, "__init__", lambda optimizer, *_, **__: self._adopt(optimizer))
        self._follow(Optimizer, "load_state_dict", lambda *_, **__: setattr(self, "_restored", True))
        self._follow(torch, "load", lambda *a, **k: self._file(self._loaded.append, *a, **k))
        self._follow(dcp, "load", lambda *a, **k: self._file(self._loaded.append, *a[1:], **k))
        for module in (torch, dcp):
            self._follow(module, "save", lambda *a, **k: self._file(self._record, *a[1:], **k), self._undo_saves)
        self._follow(dist, "destroy_process_group", lambda *_, **__: None, first=self.finish)
        self._survey(models)

    def _follow(self, owner: Any, name: str, act: Any, undo: Any = None, first: Any = lambda: None) -> None:
        """Act after each call of `owner.name`, with its arguments."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            first()
            result = original(*args, **kwargs)
            act(*args, **kwargs)
            return result

        setattr(owner, name, call)
        (self._undo if undo is None else undo).append(lambda: setattr(owner, name, original))

    def _file(self, use: Callable[[str], Any], *args: Any, **kwargs: Any) -> None:
        for place in (kwargs.get("checkpoint_id"), kwargs.get("f"), *args[:1]):
            if isinstance(place, str | Path):
                use(str(place).rstrip("/"))

    def _survey(self, modules: Iterable[nn.Module], before: Iterable[Tensor] = ()) -> None:
        """Watch the parameters of modules, first those of `before`, so that an older model takes no name of theirs."""
        modules, rows, early = list(modules), [], set(before)
        inner = {child for module in modules for child in module.children()}
        for root in (module for module in modules if module not in inner):
            for prefix, module in root.named_modules():
                for name, p in module.named_parameters(recurse=False):
                    full = WRAPPERS.sub("", f".{prefix}.{name}").strip(".")
                    rows.append((p, full, type(module).__name__, type(root).__name__ == "DistributedDataParallel"))
        for row in sorted(rows, key=lambda row: row[0] not in early):
            self._watch(*row)

    def _watch(self, p: Tensor, name: str, module: str = "", replicated: bool = False) -> None:
        if p in self._seen or p.is_meta or not p.requires_grad:
            return
        while any(name == s.name for s in self._seen.values()):
            name += "'"
        seen = self._seen[p] = Seen(name, module, tuple(p.shape), p.dtype, replicated or isinstance(p, DTensor))
        need, role = 4 * local(p).numel() * (2 * self.steps + 2), (role_of(name), seen.shape)
        if not (p.is_leaf and p.is_floating_point()) or any(
            (role_of(s.name), s.shape) == role for s in self._sampled()
        ):
            return
        if need > self._room:
            seen.undecided = "larger than the memory limit of the audit"
            return
        self._room -= need
        seen.sampled = True
        # FSDP2 calls the hooks of a DTensor after its reduction.
        hook = p.register_post_accumulate_grad_hook if isinstance(p, DTensor) else p.register_hook
        self._undo.append(hook(lambda x: self._keep(seen, x.grad if x is p else x, isinstance(p, DTensor))).remove)

    def _sampled(self) -> list[Seen]:
        return [s for s in self._seen.values() if s.sampled]

    def _keep(self, seen: Seen, gradient: Tensor | None, summed: bool) -> None:
        """Record the gradient of a backward pass; the last record has the sum of all later passes."""
        if gradient is not None and not gradient.is_sparse:
            step, piece = len(seen.groups), local(gradient).float().clone()
            for i in range(seen.passes if summed else 0):
                piece -= seen.tensors["pass", step, i]
            if seen.passes == MOST_PASSES:
                seen.passes, piece = seen.passes - 1, piece + seen.tensors["pass", step, seen.passes - 1]
            seen.tensors["pass", step, seen.passes] = piece
            seen.passes += 1

    def _adopt(self, optimizer: Optimizer) -> None:
        if self._counts.setdefault(optimizer, 0) == 0:
            groups = optimizer.param_groups
            params = [p for group in groups for p in group["params"]]
            if any(p not in self._seen for p in params):
                gc.collect()  # Modules of an earlier model, which wait for it, would take the names.
                self._survey((o for o in gc.get_objects() if issubclass(type(o), nn.Module)), params)
            for number, group in enumerate(groups):
                names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
                for name, p in zip(names, group["params"], strict=True):
                    self._watch(p, name)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._outer not in (None, optimizer):
            # Of an optimizer made of optimizers, the inner ones have states and current hyperparameters.
            for number, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    if p in self._seen and self._seen[p].groups and self._counts[self._outer] <= self.steps:
                        self._describe(p, optimizer, number, group)
            return
        self._outer, begin = optimizer, time.perf_counter()
        self._adopt(optimizer)
        # A step without a rate only makes states, as in torch.distributed's get_optimizer_state_dict.
        if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            self._meeting = self._meeting or Meeting(self.limit)
            if self._table is None and self._loaded:
                self._table = self._digests()
            count = self._counts[optimizer] = self._counts[optimizer] + 1
            for number, hyperparameters, p in self._of(optimizer):
                if count <= self.steps:
                    self._tick(p, optimizer, number, hyperparameters)
                else:
                    self._capture(p)
            if min(n for n in self._counts.values() if n) > self.steps or count > 2 * self.steps:
                self.finish()
        self._seconds += time.perf_counter() - begin

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._outer = None if self._outer is optimizer else self._outer

    def _of(self, optimizer: Optimizer) -> list[tuple[int, Mapping[str, Any], Tensor]]:
        """The optimizer's parameters with their groups. The first optimizer also has those of no optimizer, as -1."""
        groups = optimizer.param_groups
        mine: list[Any] = [(i, g, p) for i, g in enumerate(groups) for p in g["params"] if p in self._seen]
        if optimizer is next(o for o, count in self._counts.items() if count):
            taken = {p for o in self._counts for group in o.param_groups for p in group["params"]}
            mine += [(-1, groups[0], p) for p in self._seen if p not in taken]
        return mine

    def _tick(self, p: Tensor, optimizer: Optimizer, number: int, group: Mapping[str, Any]) -> None:
        """Record a parameter before a step."""
        seen = self._seen[p]
        if (dims := held(p)) is None:
            return
        seen.place, value, _, _ = digest(p, dims)
        seen.digests.append(value)
        seen.gradient |= seen.passes > 0 or (p.grad is not None and bool(local(p.grad).any()))
        if isinstance(p, DTensor):
            sides = [(p.device_mesh.size(i), getattr(x, "dim", p.ndim) - p.ndim) for i, x in enumerate(p.placements)]
            seen.shards = tuple((n, 1) if side == -2 else (1, n) for n, side in sides if n > 1 and side in (-2, -1))
        elif self._meeting is not None and self._meeting.size > 1:
            seen.shards = ((self._meeting.size, 1), (1, self._meeting.size))
        if seen.sampled:
            if p.grad is not None and not p.grad.is_sparse:
                seen.tensors["gradient", len(seen.groups)] = local(p.grad).float().clone()
            seen.tensors["before",] = local(p).clone()
        seen.groups.append({})
        seen.passes = 0
        self._describe(p, optimizer, number, group)

    def _describe(self, p: Tensor, optimizer: Optimizer, number: int, group: Mapping[str, Any]) -> None:
        """Record the hyperparameters of a step, and the states before the first one."""
        seen = self._seen[p]
        seen.optimizer, seen.number = type(optimizer).__name__ if number >= 0 else "", number
        values = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
        seen.groups[-1] = {k: v for k, v in values.items() if k not in ("params", "param_names")}
        for key, state in optimizer.state.get(p, {}).items() if seen.sampled and len(seen.groups) == 1 else ():
            if isinstance(state, Tensor) and (state.shape == p.shape or key == "step"):
                seen.tensors["start", key] = local(state).float().clone()

    def _capture(self, p: Tensor) -> None:
        """Record a parameter before the first step that is not audited: the next forward may have updated it."""
        seen = self._seen[p]
        if 0 < len(seen.digests) == len(seen.groups) and (dims := held(p)) is not None:
            seen.digests.append(digest(p, dims)[1])
            if seen.sampled:
                seen.tensors["after",] = local(p).clone()

    def _digests(self) -> dict[str, Any]:
        """Digests of weights and optimizer states on this rank, by name and state."""
        table: dict[str, Any] = {}
        for p, seen in self._seen.items():
            states = {k: v for o in self._counts for k, v in o.state.get(p, {}).items() if isinstance(v, Tensor)}
            found = {"weight": p, **{k: v for k, v in states.items() if v.ndim and v.shape == p.shape}}
            table[seen.name] = {k: digest(x, dims) for k, x in found.items() if (dims := held(x)) is not None}
        return table

    @torch.no_grad()
    def _record(self, path: str) -> None:
        """Write digests beside a saved checkpoint."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        Path(f"{path}.audit.{rank}.json").write_text(json.dumps(self._digests()))

    def close(self) -> None:
        """Conclude if the script had fewer steps than asked for, and remove all hooks."""
        try:
            self.finish()
        finally:
            while self._undo_saves:
                self._undo_saves.pop()()

    def show(self, file: Path | None = None) -> None:
        """Print the report on the first rank, and wait, because a launcher ends all ranks with the first that fails."""
        if self.report is not None and (self._meeting is None or self._meeting.rank == 0):
            print(self.report, file=sys.stderr, flush=True)
            if file is not None:
                file.write_text(json.dumps(asdict(self.report), indent=1))
        if self._meeting is not None:
            self._meeting.come("end")

    @torch.no_grad()
    def finish(self) -> None:
        """Remove the hooks of steps and gradients, compare the ranks, and judge the last step."""
        begin = time.perf_counter()
        while self._undo:
            self._undo.pop()()
        if self.report is not None:
            return
        for p in self._seen:
            self._capture(p)
        meeting = self._meeting = self._meeting or Meeting(self.limit)
        missing = meeting.come("finish")
        sampled = {s.name: (held(p), s) for p, s in self._seen.items() if s.sampled and s.digests}
        self._seen = {p: replace(s, tensors={}) for p, s in self._seen.items()}
        everyone = meeting.gather(0, {s.name: s for s in self._seen.values() if s.digests})
        names = sorted({name for part in meeting.gather(0, list(sampled)) for name in part})
        verdicts = {}
        for index, name in enumerate(meeting.tell("names", names)):
            pieces = meeting.gather(index % meeting.size, sampled.pop(name, None))
            if (evidence := _evidence([piece for piece in pieces if piece is not None])) is not None:
                verdicts[name] = evidence
        judged = meeting.gather(0, {name: judge(evidence) for name, evidence in verdicts.items()})
        tables, report = meeting.gather(0, self._table or {}), None
        if meeting.rank == 0:
            found = differences(self._loaded, tables, self._restored)
            for rank in missing:
                found["", f"did not come to the comparison within {self.limit:g} s"].append(f"rank {rank}")
            classes, seconds = [type(o).__name__ for o in self._counts], self._seconds + time.perf_counter() - begin
            every = {name: verdict for part in judged for name, verdict in part.items()}
            report = conclude(everyone, every, found, classes, self.allow, seconds)
        self.report = meeting.tell("report", report)


def _evidence(pieces: list[tuple[list[Tensor], Seen]]) -> Evidence | None:
    """Whole matrices from the pieces of all ranks; None where a piece is missing.

    Of a stack of matrices, the one with the largest last gradient stands for all. A convolution is one matrix.
    """
    if not pieces:
        return None
    seen = pieces[0][1]
    keys = [key for key in seen.tensors if all(key in s.tensors for _, s in pieces)]
    full = {k: whole(seen.shape, [(d, s.tensors[k]) for d, s in pieces]) for k in keys if k != ("start", "step")}
    tensors = {key: x for key, x in full.items() if x is not None}
    if len(seen.shape) == 3:
        last = [x for key, x in tensors.items() if key[0] in ("gradient", "pass")][-1:]
        index = int(last[0].flatten(1).norm(dim=1).argmax()) if last else 0
    tensors = {k: x if x.ndim < 3 else x.flatten(1) if x.ndim > 3 else x[index] for k, x in tensors.items()}
    if ("before",) not in tensors or ("after",) not in tensors:
        return None
    gradients = list[tuple[int, Tensor]]()
    for step in range(len(seen.groups)):
        total, passes = tensors.get(("gradient", step)), [x for k, x in tensors.items() if k[:2] == ("pass", step)]
        if total is not None and passes:
            summed = torch.stack(passes).sum(0)
            scale = float((summed * total).sum() / (summed * summed).sum().clamp(min=1e-30))
            # Otherwise the gradient was changed after backward, as by Newton-Schulz in a hook.
            if float((summed * scale - total).norm()) < 0.15 * float(total.norm()):
                passes = [x * scale for x in passes]
        gradients += [(step, x) for x in passes or ([] if total is None else [total])]
    start = {k[1]: x for k, x in (seen.tensors | tensors).items() if k[0] == "start"}
    return Evidence(tensors["before",], tensors["after",], gradients, seen, start)


@contextmanager
def watch(*models: nn.Module, steps: int = 4, allow: Iterable[str] = ()) -> Iterator[Audit]:
    """Audit the steps of all optimizers in the context; the yielded audit has a `report` at the end.

    Enter it before the first backward pass. Args: `models`, by default all modules once an optimizer is made; `steps`
    of each optimizer; `allow`, codes of findings that do not count, each with `:NAMES` or not.
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
