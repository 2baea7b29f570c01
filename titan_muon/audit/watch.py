"""Watches the parameters of models and optimizers through PyTorch's hooks, for a few steps of each optimizer."""

import gc
import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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

from .judge import Seen, Step, Verdict
from .ranks import Digest, Meeting, digest, held, join, local, rank_and_size
from .report import Report, conclude, differences, role_of

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
MOST_PASSES = 8


class Audit:
    """Audit of the steps of all optimizers in its context. `report` is set after the audited steps, or at the end.

    Enter it before the first backward pass. Args: `models`, by default all; `steps` of each optimizer; `memory` in
    bytes for sampled tensors of this rank; `limit` in seconds for waits between ranks; `allow`, codes of findings that
    do not count.
    """

    def __init__(self, *models: nn.Module, steps: int = 4, memory: float = 2**31, limit: float = 60.0,
                 allow: Collection[str] = ()) -> None:  # fmt: skip
        self.models, self.steps, self.limit, self.allow, self._room = models, steps, limit, allow, memory
        self.report: Report | None = None
        self.meeting: Meeting
        self._seen: dict[Tensor, Seen] = {}
        self._optimizers, self._resumed = list[Optimizer](), False
        self._known = set[Any]()
        # Backward passes of all, those before the last round of steps, and rounds.
        self._passes, self._begun, self._round = 0, 0, 0
        self._loaded = list[Path]()
        self._hooks, self._saves = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Watch the passed models, and the optimizers, backward passes and checkpoints of the script."""
        # Not removed by itself, because a step may have more hooks to call.
        self._saves.callback(register_optimizer_step_pre_hook(self._before).remove)
        _follow(self._hooks, Optimizer, "__init__", lambda optimizer, *_, **__: self._adopt(optimizer))
        _follow(self._hooks, torch.autograd, "backward", self._count)
        _follow(self._hooks, dist, "destroy_process_group", lambda *_, **__: self.finish(), first=True)
        for module in (torch, dcp):
            _follow(self._hooks, module, "load", lambda *args, **named: self._loaded.extend(_paths(args, named)))
            _follow(self._saves, module, "save", lambda *args, **named: self._save(_paths(args[1:], named)))
        if self.models:
            self._survey()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Conclude if the script had fewer steps than asked for. An error ends the audit without a report."""
        if kind is not None:
            self.report = self.report or Report()
        with self._saves:
            self.finish()

    def _count(self, *_: Any, **__: Any) -> None:
        self._passes += 1

    def _adopt(self, optimizer: Optimizer) -> None:
        """Know an optimizer, and watch all models if it has a parameter of an unknown one.

        Never during a forward or backward pass, when FSDP2's modules have other parameters.
        """
        self._optimizers.append(optimizer)
        if not self._taken() <= self._seen.keys():
            self._survey()

    def _survey(self) -> None:
        """Watch the parameters of models, first of those with an optimizer, so that a copy takes no name."""
        gc.collect()  # Modules of an earlier model, which wait for it, would take the names.
        modules = self.models or [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
        inner, taken = {child for module in modules for child in module.children()}, self._taken()
        roots = [module for module in modules if module not in inner]
        for root in sorted(roots, key=lambda root: taken.isdisjoint(root.parameters())):
            for name, p in root.named_parameters():
                owner = type(root.get_submodule(name.rpartition(".")[0])).__name__
                self._watch(p, WRAPPERS.sub("", f".{name}").strip("."), owner)

    def _taken(self) -> set[Tensor]:
        return {p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}

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

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record a step before it starts, or after its closure, which has the backward pass."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self.report is not None or closure is None:
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
        if self.report is not None:
            return
        if optimizer not in self._optimizers:
            self._adopt(optimizer)
        rows = [(p, group, type(optimizer).__name__) for group in optimizer.param_groups for p in group["params"]]
        for number, (p, _, _) in enumerate(rows):
            self._watch(p, f"parameter{number}")
        if self._passes > self._begun:
            self._begun, self._round = self._passes, self._round + 1
            if self._round == 1:
                self._survey()
                states = [x for o in self._optimizers for state in o.state.values() for x in state.values()]
                self._resumed = any(bool(x.ndim and local(x).any()) for x in states if isinstance(x, Tensor))
            steps = [len(seen.groups) for seen in self._seen.values() if seen.groups]
            if self._round > 2 * self.steps or min(steps, default=0) == self.steps:
                return self.finish()
            for p, known in self._seen.items() if self._loaded else ():
                known.loaded = known.loaded or self._digests(p)
            taken = self._taken()
            rows += [(p, optimizer.param_groups[0], "") for p in self._seen if p not in taken]
        for p, group, owner in rows:
            if (seen := self._seen.get(p)) is None:
                continue
            if self._round > seen.round and self._weigh(p, seen) and len(seen.groups) < self.steps:
                self._begin(p, seen)
            if seen.groups and self._round == seen.round:
                # The innermost optimizer comes last.
                state = optimizer.state.get(p, {})
                values = {"step": state.get("step"), **group}.items()
                numbers = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in values}
                seen.groups[-1] = {k: v for k, v in numbers.items() if isinstance(v, int | float | tuple | list)}
                seen.optimizer = owner
                if seen.sampled and len(seen.groups) == 1:
                    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
                    seen.tensors |= {("start", k): local(v).float().clone() for k, v in tensors.items()}

    def _weigh(self, p: Tensor, seen: Seen) -> bool:
        """Record a weight, once before each step. False if this rank has no known piece of it."""
        if p.shape != seen.shape:
            seen.undecided = "its shape changed, as under ZeRO-3, which empties parameters between their uses"
        if p.shape != seen.shape or (found := digest(p)) is None:
            return False
        if len(seen.digests) == len(seen.groups):
            seen.place = found.place
            seen.digests.append(str(found.form))
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
        seen.turns |= self._round > seen.round + 1
        seen.passes, seen.round, seen.resumed = 0, self._round, self._resumed
        seen.groups.append({})

    @torch.no_grad()
    def _digests(self, p: Tensor) -> dict[str, Digest]:
        """Digests of a weight and of its optimizer states on this rank."""
        states = {k: v for o in self._optimizers for k, v in o.state.get(p, {}).items() if isinstance(v, Tensor)}
        tensors = {"weight": p, **{k: v for k, v in states.items() if v.ndim and v.shape == p.shape}}
        return {k: found for k, x in tensors.items() if (found := digest(x)) is not None}

    def _save(self, paths: Sequence[Path]) -> None:
        for path in paths:
            file = path.with_name(f"{path.name}.audit.{rank_and_size()[0]}.json")
            file.write_text(json.dumps({seen.name: self._digests(p) for p, seen in self._seen.items()}))

    @torch.no_grad()
    def finish(self) -> None:
        """Remove the hooks of steps and gradients, compare the ranks, and judge the last step."""
        begin = time.perf_counter()
        self._hooks.close()
        if self.report is not None:
            return
        for p, seen in self._seen.items():
            # A rank without a piece of a matrix has no backward pass of the matrix, either.
            if seen.passes and not (seen.groups or seen.undecided):
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
            tensors = join(pieces[0][1].shape, [(dims, s.tensors) for dims, s in pieces]) if pieces else {}
            if {"before", "after"} <= tensors.keys():
                verdicts[name] = Step(pieces[0][1], tensors).judge()
        judged = {name: verdict for part in meeting.gather(verdicts) for name, verdict in part.items()}
        found = differences(meeting.gather(self._loaded)[0], everyone)
        if missing:
            text = f"did not come to the comparison within {self.limit:g} s"
            found["undecided", text].append(f"rank {', '.join(map(str, missing))}")
        self.report = conclude(everyone, judged, found, self.allow, time.perf_counter() - begin)
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
