"""Watches the parameters of models and optimizers through PyTorch's hooks, for a few steps of each optimizer."""

import gc
import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .checkpoints import Table, differences, follow, follow_files
from .judge import Evidence, Seen, Verdict, judge
from .ranks import Meeting, digest, held, local, rank_and_size, whole
from .report import Report, conclude, role_of

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
        self._outer: Optimizer | None = None
        self._table: Table = {}
        self._seconds, self._passes = 0.0, 0
        # Steps of each optimizer, and all backward passes before its last step.
        self._counts: dict[Optimizer, int] = {}
        self._stepped: dict[Optimizer, int] = {}
        self._seen: dict[Tensor, Seen] = {}
        self._loaded = list[Path]()
        self._hooks, self._saves = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Watch the parameters of the models, and the constructors, steps and checkpoints of the script."""
        self._hooks.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after).remove)
        follow(self._hooks, Optimizer, "__init__", lambda optimizer, *_, **__: self._adopt(optimizer))
        follow(self._hooks, dist, "destroy_process_group", before=lambda *_, **__: self.finish())
        follow_files(self._hooks, "load", 0, self._loaded.append)
        follow_files(self._saves, "save", 1, self._save)
        self._survey(self.models)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Conclude if the script had fewer steps than asked for. An error ends the audit without a report."""
        if kind is not None:
            self.report = self.report or Report()
        with self._saves:
            self.finish()

    def _survey(self, modules: Iterable[nn.Module], before: Iterable[Tensor] = ()) -> None:
        """Watch the parameters of modules, first those of `before`, so that an older model takes no name of theirs."""
        modules, rows, early = list(modules), [], set(before)
        inner = {child for module in modules for child in module.children()}
        for root in (module for module in modules if module not in inner):
            for name, p in root.named_parameters():
                owner = type(root.get_submodule(name.rpartition(".")[0])).__name__
                rows.append((p, WRAPPERS.sub("", f".{name}").strip("."), owner))
        for row in sorted(rows, key=lambda row: row[0] not in early):
            self._watch(*row)

    def _watch(self, p: Tensor, name: str, module: str = "") -> None:
        if p in self._seen or p.is_meta or not p.requires_grad:
            return
        while any(name == s.name for s in self._seen.values()):
            name += "'"
        seen, room = Seen(name, module, tuple(p.shape), p.dtype, isinstance(p, DTensor)), self._room
        sampled = any(s.sampled and (role_of(s.name), s.shape) == (role_of(name), p.shape) for s in self._seen.values())
        self._seen[p] = seen
        if sampled or not (p.is_leaf and p.is_floating_point()):
            return
        self._room -= 4 * local(p).numel() * (2 * self.steps + 2)
        if self._room < 0:
            self._room, seen.undecided = room, "larger than the memory limit of the audit"
            return
        seen.sampled = True
        # FSDP2 calls the hooks of a DTensor after its reduction.
        hook = p.register_post_accumulate_grad_hook if isinstance(p, DTensor) else p.register_hook
        self._hooks.callback(hook(lambda x: self._keep(seen, x.grad if x is p else x, isinstance(p, DTensor))).remove)

    def _keep(self, seen: Seen, gradient: Tensor | None, summed: bool) -> None:
        """Record the gradient of a backward pass; the last record has the sum of all later passes."""
        self._passes += 1
        if gradient is not None and not gradient.is_sparse:
            step, piece = len(seen.groups), local(gradient).float().clone()
            kept = {key: x for key, x in seen.tensors.items() if key[:2] == ("pass", step)}
            for earlier in kept.values() if summed else ():
                piece -= earlier
            key = "pass", step, min(seen.passes, MOST_PASSES - 1)
            seen.tensors[key] = piece + kept.get(key, 0)
            seen.passes += 1

    def _adopt(self, optimizer: Optimizer) -> None:
        """Watch an optimizer's parameters, with the names of live modules, until its first step."""
        if self._counts.setdefault(optimizer, 0) == 0:
            params = [p for p, _ in _rows(optimizer)]
            if any(p not in self._seen for p in params):
                gc.collect()  # Modules of an earlier model, which wait for it, would take the names.
                self._survey((o for o in gc.get_objects() if issubclass(type(o), nn.Module)), params)
            for number, group in enumerate(optimizer.param_groups):
                names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
                for name, p in zip(names, group["params"], strict=True):
                    self._watch(p, name)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record a step of the outer optimizer before it starts, or after its closure, which has the backward pass."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._outer not in (None, optimizer):
            # Of an optimizer made of optimizers, the inner ones have states and current hyperparameters.
            for p, group in _rows(optimizer):
                if p in self._seen and self._seen[p].groups and self._counts[self._outer] <= self.steps:
                    self._describe(p, optimizer, group)
            return None
        self._outer = optimizer
        self._adopt(optimizer)
        if closure is None:
            return self._step(optimizer)

        def record_after() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": record_after}

    @torch.no_grad()
    def _step(self, optimizer: Optimizer) -> None:
        begin = time.perf_counter()
        # Without a new backward pass, DeepSpeed steps once for each group, and torch.distributed's
        # get_optimizer_state_dict with a rate of 0, to make states.
        rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        if self._passes > self._stepped.get(optimizer, 0) or (self._passes == 0 and any(rates)):
            self._stepped[optimizer] = self._passes
            if self._loaded:
                self._table = self._table or self._digests()
            count = self._counts[optimizer] = self._counts[optimizer] + 1
            rows, taken = _rows(optimizer), {p for o in self._counts for p, _ in _rows(o)}
            if optimizer is next(iter(self._stepped)):
                rows += [(p, optimizer.param_groups[0]) for p in self._seen if p not in taken]
            for p, group in rows:
                if p in self._seen and self._weigh(p) and count <= self.steps:
                    self._begin(p)
                    self._describe(p, optimizer if p in taken else None, group)
            if min(self._counts[o] for o in self._stepped) > self.steps or count > 2 * self.steps:
                self.finish()
        self._seconds += time.perf_counter() - begin

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._outer = None if self._outer is optimizer else self._outer

    def _weigh(self, p: Tensor) -> bool:
        """Record a weight, once before each step. False if this rank has no known piece of it."""
        seen = self._seen[p]
        if p.shape != seen.shape:
            seen.undecided = "its shape changed, as under ZeRO-3, which empties parameters between their uses"
        if p.shape != seen.shape or len(seen.digests) > len(seen.groups) or (dims := held(p)) is None:
            return False
        seen.place, value, *_ = digest(p, dims)
        seen.digests.append(value)
        if seen.sampled:
            if "after" in seen.tensors:
                seen.tensors["before"] = seen.tensors["after"]
            seen.tensors["after"] = local(p).clone()
        return True

    def _begin(self, p: Tensor) -> None:
        """Record the gradient of a step."""
        seen = self._seen[p]
        seen.gradient |= seen.passes > 0 or (p.grad is not None and bool(local(p.grad).any()))
        sizes = p.device_mesh.shape if isinstance(p, DTensor) else rank_and_size()[1:]
        seen.shards = tuple(split for n in sizes if n > 1 for split in ((n, 1), (1, n)))
        if seen.sampled and p.grad is not None and not p.grad.is_sparse:
            seen.tensors["gradient", len(seen.groups)] = local(p.grad).float().clone()
        seen.passes = 0
        seen.groups.append({})

    def _describe(self, p: Tensor, optimizer: Optimizer | None, group: Mapping[str, Any]) -> None:
        """Record the hyperparameters of a step, and the states before the first one."""
        seen = self._seen[p]
        seen.optimizer = "" if optimizer is None else type(optimizer).__name__
        values = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
        seen.groups[-1] = {k: v for k, v in values.items() if k not in ("params", "param_names")}
        for key, state in optimizer.state.get(p, {}).items() if optimizer is not None else ():
            if (
                seen.sampled
                and len(seen.groups) == 1
                and isinstance(state, Tensor)
                and (state.shape == p.shape or key == "step")
            ):
                seen.tensors["start", key] = local(state).float().clone()

    @torch.no_grad()
    def _digests(self) -> Table:
        """Digests of weights and optimizer states on this rank, by name and state."""
        table: Table = {}
        for p, seen in self._seen.items():
            states = {k: v for o in self._counts for k, v in o.state.get(p, {}).items() if isinstance(v, Tensor)}
            found = {"weight": p, **{k: v for k, v in states.items() if v.ndim and v.shape == p.shape}}
            table[seen.name] = {k: digest(x, dims) for k, x in found.items() if (dims := held(x)) is not None}
        return table

    def _save(self, path: Path) -> None:
        digests = json.dumps(self._digests())
        path.with_name(f"{path.name}.audit.{rank_and_size()[0]}.json").write_text(digests)

    @torch.no_grad()
    def finish(self) -> None:
        """Remove the hooks of steps and gradients, compare the ranks, and judge the last step."""
        begin = time.perf_counter()
        self._hooks.close()
        if self.report is not None:
            return
        for p, seen in self._seen.items():
            if seen.digests:
                self._weigh(p)
        meeting = self.meeting = Meeting(self.limit)
        missing = meeting.come("finish")
        sampled = {
            s.name: (held(p), s) for p, s in self._seen.items() if s.digests and s.sampled and p.shape == s.shape
        }
        everyone = meeting.gather(
            0, {s.name: replace(s, tensors={}) for s in self._seen.values() if s.digests or s.undecided}
        )
        names = sorted({name for part in everyone for name, s in part.items() if s.sampled})
        verdicts = dict[str, Verdict]()
        for index, name in enumerate(meeting.tell(names)):
            # One matrix after the other, and each on one rank.
            pieces = [piece for piece in meeting.gather(index % meeting.size, sampled.pop(name, None)) if piece]
            if pieces and (evidence := _evidence(pieces[0][1], pieces)) is not None:
                verdicts[name] = judge(evidence)
        judged, tables = meeting.gather(0, verdicts), meeting.gather(0, self._table)
        if meeting.rank == 0:
            found = differences(self._loaded, tables)
            if missing:
                ranks = f"rank {', '.join(map(str, missing))}"
                found["", f"did not come to the comparison within {self.limit:g} s"].append(ranks)
            seconds = self._seconds + time.perf_counter() - begin
            every = {name: verdict for part in judged for name, verdict in part.items()}
            self.report = conclude(everyone, every, found, self.allow, seconds)
        self._seen = {p: replace(s, tensors={}) for p, s in self._seen.items()}
        self.report = meeting.tell(self.report)


def _rows(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]


def _evidence(seen: Seen, pieces: list[tuple[list[Tensor], Seen]]) -> Evidence | None:
    """Whole matrices from the pieces of all ranks; None where a piece is missing.

    Of a stack of matrices, the one with the largest last gradient stands for all. A convolution is one matrix.
    """
    keys = [key for key in seen.tensors if key != ("start", "step") and all(key in s.tensors for _, s in pieces)]
    keys = [key for key in keys if all(s.tensors[key].shape == tuple(map(len, dims)) for dims, s in pieces)]
    full = {key: whole(seen.shape, [(dims, s.tensors[key]) for dims, s in pieces]) for key in keys}
    tensors = {key: x.flatten(1) if x.ndim > 3 else x for key, x in full.items() if x is not None}
    if len(seen.shape) == 3:
        last = [x for key, x in tensors.items() if key[0] in ("gradient", "pass")][-1:]
        index = int(last[0].flatten(1).norm(dim=1).argmax()) if last else 0
        tensors = {key: x[index] for key, x in tensors.items()}
    if "before" not in tensors or "after" not in tensors:
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
    momenta = [x for k, x in start.items() if "sq" not in k and x.shape == tensors["before"].shape and x.any()]
    gradients = [*((-1, x) for x in momenta[:1]), *gradients]
    return Evidence(tensors["before"], tensors["after"], gradients, seen, start)


watch = Audit
