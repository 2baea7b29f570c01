"""Watches the parameters of models and optimizers through PyTorch's hooks, for a few steps of each optimizer."""

import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .judge import Seen, Verdict, gather_evidence, judge
from .ranks import Meeting, digest, held, local, rank_and_size, whole
from .report import Report, Table, conclude, differences, role_of

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
MOST_PASSES = 8


class Audit:
    """Audit of the steps of all optimizers in its context. `report` is set after the audited steps, or at the end.

    Enter it before the first backward pass. Args: `models`, by default all modules once an optimizer is made; `steps`
    of each optimizer; `memory` in bytes for sampled tensors of this rank; `limit` in seconds for waits between ranks;
    `allow`, codes of findings that do not count, each with `:NAMES` or not.
    """

    def __init__(
        self, *models: nn.Module, steps: int = 4, memory: float = 2**31, limit: float = 60.0, allow: Iterable[str] = ()
    ) -> None:
        self.models, self.steps, self.limit, self.allow, self._room = models, steps, limit, tuple(allow), memory
        self.report: Report | None = None
        self.meeting: Meeting
        self._table: Table = {}
        self._loaded = list[Path]()
        # Seconds, backward passes of all, before the last step but one and before the last step, and steps with a pass.
        self._seconds, self._passes, self._turn, self._begun, self._rounds = 0.0, 0, 0, 0, 0
        self._resumed, self._stepped = False, dict[Optimizer, bool]()
        self._seen: dict[Tensor, Seen] = {}
        self._known = set[Any]()
        self._hooks, self._saves = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Watch the parameters of the models, and the constructors, steps and checkpoints of the script."""
        # Not removed by itself, because a step may have more hooks to call.
        self._saves.callback(register_optimizer_step_pre_hook(self._before).remove)
        _follow(self._hooks, Optimizer, "__init__", lambda optimizer, *_, **__: self._adopt(optimizer))
        _follow(self._hooks, torch.autograd, "backward", self._count)
        _follow(self._hooks, dist, "destroy_process_group", lambda *_, **__: self.finish(), first=True)
        for module in (torch, dcp):
            _follow(self._hooks, module, "load", lambda *args, **named: self._loaded.extend(_paths(args, named)))
            _follow(self._saves, module, "save", lambda *args, **named: self._save(_paths(args[1:], named)))
        self._survey(self.models)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Conclude if the script had fewer steps than asked for. An error ends the audit without a report."""
        if kind is not None:
            self.report = self.report or Report()
        with self._saves:
            self.finish()

    def _survey(self, modules: Iterable[nn.Module], before: Iterable[Tensor] = ()) -> None:
        """Watch the parameters of modules, first of models with those of `before`, so that a copy takes no name."""
        modules, early = list(modules), set(before)
        inner = {child for module in modules for child in module.children()}
        roots = [module for module in modules if module not in inner]
        for root in sorted(roots, key=lambda root: early.isdisjoint(root.parameters())):
            for name, p in root.named_parameters():
                owner = type(root.get_submodule(name.rpartition(".")[0])).__name__
                self._watch(p, WRAPPERS.sub("", f".{name}").strip("."), owner)

    def _watch(self, p: Tensor, name: str, module: str = "") -> None:
        if p in self._seen or p.is_meta or not p.requires_grad:
            return
        while name in self._known:
            name += "'"
        seen = self._seen[p] = Seen(name, module, tuple(p.shape), p.dtype)
        role, size = (role_of(name), p.shape), 4 * local(p).numel() * (2 * self.steps + 2)
        if role not in self._known and p.is_leaf and p.is_floating_point():
            if size > self._room:
                seen.undecided = "larger than the memory limit of the audit"
            else:
                self._room -= size
                seen.sampled = True
                # FSDP2 calls the hooks of a DTensor after its reduction.
                hook = p.register_post_accumulate_grad_hook if isinstance(p, DTensor) else p.register_hook
                self._hooks.callback(hook(lambda x: self._keep(seen, x)).remove)
        self._known |= {name, role} if seen.sampled else {name}

    def _count(self, *_: Any, **__: Any) -> None:
        self._passes += 1

    def _keep(self, seen: Seen, x: Tensor) -> None:
        """Record the gradient of a backward pass; the last record has the sum of all later passes."""
        gradient = x.grad if x in self._seen else x
        if gradient is not None and not gradient.is_sparse:
            step, piece = len(seen.groups), local(gradient).float().clone()
            kept = {key: g for key, g in seen.tensors.items() if key[:2] == ("pass", step)}
            for earlier in kept.values() if gradient is not x else ():
                piece -= earlier
            key = "pass", step, min(seen.passes, MOST_PASSES - 1)
            seen.tensors[key] = piece + kept.get(key, 0)
            seen.passes += 1

    def _adopt(self, optimizer: Optimizer, first: bool = False) -> None:
        """Watch the parameters of an optimizer, and of all models, when it is made and at the first step of all."""
        if self._stepped.setdefault(optimizer, False):
            return
        params = [p for p, _ in _rows(optimizer)]
        if first or any(p not in self._seen for p in params):
            gc.collect()  # Modules of an earlier model, which wait for it, would take the names.
            self._survey((o for o in gc.get_objects() if issubclass(type(o), nn.Module)), params)
        for number, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                self._watch(p, f"group{number}.{i}")
                if p in self._seen:
                    self._seen[p].optimizer = type(optimizer).__name__

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record a step before it starts, or after its closure, which has the backward pass."""
        if self.report is not None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._adopt(optimizer, first=not self._rounds)
        if closure is None:
            return self._step(optimizer)

        def record_after() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": record_after}

    @torch.no_grad()
    def _step(self, optimizer: Optimizer) -> None:
        """Record a step, with the parameters that are in no optimizer.

        Each parameter has one step after each backward pass, because an optimizer may be made of optimizers, DeepSpeed
        steps once for each group, and get_optimizer_state_dict with a rate of 0, to make states.
        """
        begin, others = time.perf_counter(), dict[Tensor, Any]()
        if self._passes > self._begun:
            self._turn, self._begun, self._rounds = self._begun, self._passes, self._rounds + 1
            begun = [len(seen.groups) for seen in self._seen.values() if seen.groups]
            if self._rounds > 2 * self.steps or (begun and min(begun) == self.steps):
                return self.finish()
            if self._loaded:
                self._table = self._table or self._digests()
            taken = {p for o in self._stepped for p, _ in _rows(o)}
            others = {p: optimizer.param_groups[0] for p in self._seen if p not in taken}
            if self._rounds == 1:
                states = [v for o in self._stepped for state in o.state.values() for v in state.values()]
                self._resumed = any(isinstance(v, Tensor) and v.ndim and v.any() for v in states)
        self._stepped[optimizer] = True
        for p, group in [*_rows(optimizer), *others.items()]:
            if (seen := self._seen.get(p)) is None:
                continue
            if self._passes > seen.begun and self._weigh(p, seen) and len(seen.groups) < self.steps:
                self._begin(p, seen)
            if seen.groups and self._passes == seen.begun:
                # The innermost optimizer comes last.
                values = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
                seen.groups[-1] = {k: v for k, v in values.items() if k not in ("params", "param_names")}
                seen.optimizer = "" if p in others else type(optimizer).__name__
                start = optimizer.state.get(p, {}) if seen.sampled and len(seen.groups) == 1 else {}
                seen.age = float(start.get("step", seen.age))
                tensors = {k: v for k, v in start.items() if isinstance(v, Tensor) and v.shape == p.shape}
                seen.tensors |= {("start", k): local(v).float().clone() for k, v in tensors.items()}
        self._seconds += time.perf_counter() - begin
        return None

    def _weigh(self, p: Tensor, seen: Seen) -> bool:
        """Record a weight, once before each step. False if this rank has no known piece of it."""
        if p.shape != seen.shape:
            seen.undecided = "its shape changed, as under ZeRO-3, which empties parameters between their uses"
        if p.shape != seen.shape or (found := digest(p)) is None:
            return False
        if len(seen.digests) == len(seen.groups):
            seen.place = found.place
            seen.digests.append(found.form)
            if seen.sampled:
                now = local(p).clone()
                seen.tensors |= {"before": seen.tensors.get("after", now), "after": now}
        return True

    def _begin(self, p: Tensor, seen: Seen) -> None:
        """Record the gradient of a step."""
        gradient = None if p.grad is None else local(p.grad).to_dense()
        found = digest(gradient) if gradient is not None else None
        seen.gradients.append(found.form if found else math.nan if seen.passes else 0.0)
        if seen.sampled and gradient is not None:
            seen.tensors["gradient", len(seen.groups)] = gradient.float().clone()
        sizes = p.device_mesh.shape if isinstance(p, DTensor) else rank_and_size()[1:]
        seen.shards = tuple(split for n in sizes if n > 1 for split in ((n, 1), (1, n)))
        seen.turns |= seen.passes > self._passes - self._turn
        seen.passes, seen.begun, seen.resumed = 0, self._passes, self._resumed
        seen.groups.append({})

    @torch.no_grad()
    def _digests(self) -> Table:
        """Digests of weights and optimizer states on this rank, by name and state."""
        table: Table = {}
        for p, seen in self._seen.items():
            states = {k: v for o in self._stepped for k, v in o.state.get(p, {}).items() if isinstance(v, Tensor)}
            tensors = {"weight": p, **{k: v for k, v in states.items() if v.ndim and v.shape == p.shape}}
            table[seen.name] = {k: found for k, x in tensors.items() if (found := digest(x)) is not None}
        return table

    def _save(self, paths: Sequence[Path]) -> None:
        for path in paths:
            file = path.with_name(f"{path.name}.audit.{rank_and_size()[0]}.json")
            file.write_text(json.dumps(self._digests()))

    @torch.no_grad()
    def finish(self) -> None:
        """Remove the hooks of steps and gradients, compare the ranks, and judge the last step."""
        begin = time.perf_counter()
        self._hooks.close()
        if self.report is not None:
            return
        for p, seen in self._seen.items():
            # A rank without a piece of a matrix has no backward pass of the matrix, either.
            if seen.optimizer and (seen.passes or not self._rounds) and not (seen.groups or seen.undecided):
                seen.undecided = "its optimizer made no step after a backward pass"
            self._weigh(p, seen)
        meeting = self.meeting = Meeting(self.limit)
        missing = meeting.come("finish")
        mine = {s.name: (held(p), s) for p, s in self._seen.items() if s.groups and s.sampled and p.shape == s.shape}
        known = {s.name: replace(s, tensors={}) for s in self._seen.values() if s.digests or s.undecided}
        everyone, verdicts = meeting.gather(known), dict[str, Verdict]()
        for index, name in enumerate(sorted({name for part in everyone for name, s in part.items() if s.sampled})):
            # One matrix after the other, and each on one rank.
            pieces = [piece for piece in meeting.gather(mine.pop(name, None), index % meeting.size) if piece]
            tensors = dict[Any, Tensor]()
            for key in pieces[0][1].tensors if pieces else ():
                fits = all(key in s.tensors and s.tensors[key].shape == tuple(map(len, dims)) for dims, s in pieces)
                full = whole(pieces[0][1].shape, [(dims, s.tensors[key]) for dims, s in pieces]) if fits else None
                tensors |= {} if full is None else {key: full}
            if {"before", "after"} <= tensors.keys():
                evidence = gather_evidence(pieces[0][1], tensors)
                verdict = judge(evidence)
                faults = evidence.wrong.items() if verdict.kind != "still" else ()
                verdicts[name] = replace(verdict, wrong=(*faults, *verdict.wrong))
        parts = meeting.gather((verdicts, self._table, self._loaded))
        found = differences(parts[0][2], [table for _, table, _ in parts])
        if missing:
            ranks = f"rank {', '.join(map(str, missing))}"
            found["", f"did not come to the comparison within {self.limit:g} s"].append(ranks)
        judged = {name: verdict for part, _, _ in parts for name, verdict in part.items()}
        seconds = self._seconds + time.perf_counter() - begin
        self.report = conclude(everyone, judged, found, self.allow, seconds)
        for seen in self._seen.values():
            seen.tensors.clear()


watch = Audit


def _follow(hooks: ExitStack, owner: Any, name: str, act: Callable[..., Any], first: bool = False) -> None:
    """Until `hooks` close, act after each call of `owner.name`, or before it, with its arguments."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if first:
            act(*args, **kwargs)
        result = original(*args, **kwargs)
        if not first:
            act(*args, **kwargs)
        return result

    hooks.enter_context(patch.object(owner, name, call))


def _paths(words: Sequence[Any], names: Mapping[str, Any]) -> list[Path]:
    """The path of a checkpoint, which is the first of these arguments or has one of two names."""
    places = *words[:1], names.get("f"), names.get("checkpoint_id")
    return [Path(place) for place in places if isinstance(place, str | Path)]


def _rows(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]
