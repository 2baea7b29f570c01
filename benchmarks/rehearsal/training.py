"""Two training steps of a recipe on a rank, with records.

Imported only under `fake_gpu`, because TorchTitan copies the device on import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.rehearsal.fake_gpu import FakeGpu, fake_rank
from benchmarks.rehearsal.recorder import LiveMemory, Operations, storages
from benchmarks.rehearsal.seen import UNEQUAL, Bytes, Collective, Seen
from benchmarks.rehearsal.subject import build_trainer, without_files
from titan_muon.engine.faults.clip import GradientClip
from titan_muon.features.offload import Copied, Window
from titan_muon.muon import Muon
from titan_muon.owned import private
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.run.trainer import MuonTrainer


def rehearse(recipe: Recipe, world_size: int, rank: int, gpu: FakeGpu, folder: str) -> Seen:
    """Two training steps of a rank.

    Raises DeviceSync if the host waits in the optimizer step, except for parameters on the host (`enable_cpu_offload`).
    """
    with ExitStack() as stack:
        stack.enter_context(fake_rank(world_size, rank))
        # As with NCCL, and unlike the fake group: owned layers launch their operations together, in streams.
        stack.enter_context(mock.patch.object(private, "coalesces", return_value=True))
        memory = stack.enter_context(LiveMemory().following_resizes())
        trainer = build_trainer(without_files(recipe), world_size, gpu, folder)
        return _Rehearsal(trainer, gpu, memory).seen(rank)


class _Rehearsal:
    def __init__(self, trainer: MuonTrainer, gpu: FakeGpu, memory: LiveMemory) -> None:
        self.trainer, self.gpu, self.memory = trainer, gpu, memory
        self.muon = next((optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Muon)), None)
        self.operations: Counter[str] = Counter()
        self.training_peak = self.step_start = self.step_peak = Bytes(0, 0, 0, 0, 0, 0)
        self.training: tuple[Collective, ...] = ()
        self.step: tuple[Collective, ...] = ()

    def seen(self, rank: int) -> Seen:
        """Take both steps."""
        made = len(dist.distributed_c10d._world.pg_map)
        self.memory.reset()
        constant = _bytes(self.memory.largest(), self._held()).rest
        # Buffers for a later forward live until the second step's forward ends.
        first = self._train()
        self._train()
        if self.muon is not None:
            self.muon.finish_step()
        second = self.memory.alive
        made = len(dist.distributed_c10d._world.pg_map) - made
        return Seen(
            rank=rank,
            matrices=0 if self.muon is None else len(self.muon.plan.matrices),
            orthogonalized=0 if self.muon is None else self.muon.orthogonalized,
            operations=dict(self.operations),
            training_peak=self.training_peak,
            step_start=self.step_start,
            step_peak=self.step_peak,
            constant=constant,
            at_rest=(first, second),
            training=self.training,
            step=self.step,
            groups_made=made,
            reads=len(self.gpu.syncs),
        )

    def _train(self) -> int:
        """A training step. Returns the live bytes afterwards."""
        trainer = self.trainer
        trainer.step += 1
        self.gpu.syncs.clear()
        self.memory.reset()
        batches = trainer.batch_generator(trainer.dataloader)
        watched, call = self._watched(trainer.optimizers.step), GradientClip.__call__

        def clip_without_waits(clip: GradientClip) -> Tensor:
            with self.gpu.no_sync():
                return call(clip)

        with (
            mock.patch.object(trainer.optimizers, "step", watched),
            mock.patch.object(GradientClip, "__call__", clip_without_waits),
            CollectiveCounter() as self.counter,
        ):
            if trainer.parallel_dims.pp_enabled:
                # Stages exchange shapes, which the fake group cannot answer: run only clipping and the step.
                give_gradients(p for part in trainer.model_parts for p in part.parameters())
                trainer.counted = False
                trainer._clip_gradients()
                trainer.optimizers.step()
            else:
                trainer.train_step(batches)
        trainer.optimizers.zero_grad()
        return self.memory.alive

    def _watched(self, step: Callable[[], None]) -> Callable[[], None]:
        """The optimizer step, recorded separately."""

        def watched() -> None:
            held, window = self._held(), dict[object, int]()
            begin = Window.begin

            def begins(opened: Window, transfers: Sequence[Sequence[Copied]]) -> None:
                begin(opened, transfers)
                for transfer in transfers:
                    used = storages(copied.on_device for copied in transfer)
                    window.update({key: max(size, window.get(key, 0)) for key, size in used.items()})

            self.training_peak = _bytes(self.memory.largest(), held)
            self.training = _collectives(self.counter)
            self.counter.calls.clear()
            self.memory.reset()
            self.step_start = _bytes(self.memory.largest(), held)
            unwatched = self.trainer.config.training.enable_cpu_offload
            no_sync = _no_sync(self.gpu, unwatched=unwatched)
            with mock.patch.object(Window, "begin", begins), no_sync, Operations() as operations:
                step()
            self.operations = operations.counts
            self.step = _collectives(self.counter)
            # States exist after the first step. The device has a window of states on the host.
            states = {"optimizer_states": {**self._states()["optimizer_states"], **window}}
            self.step_peak = _bytes(self.memory.largest(), {**held, **states})

        return watched

    def _held(self) -> dict[str, Mapping[object, int]]:
        """Storages by purpose."""
        parameters = [p for part in self.trainer.model_parts for p in part.parameters()]
        by_purpose = {
            "parameters": storages(parameters),
            "gradients": storages(p.grad for p in parameters if p.grad is not None),
            **self._states(),
        }
        if self.muon is not None:
            engine = self.muon.engine
            # Buckets and batches share storages: count each storage once, at its largest.
            by_purpose["exchange_buffers"] = _largest(engine.rank.buffers.tensors)
            by_purpose["orthogonalization"] = _largest(
                batch.whole for views in engine.step.views for _, batch, _ in views.batches
            )
        return by_purpose

    def _states(self) -> dict[str, Mapping[object, int]]:
        states = (
            value
            for optimizer in self.trainer.optimizers
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        )
        return {"optimizer_states": storages(states)}


def _largest(tensors: Iterable[Tensor]) -> dict[object, int]:
    sizes: dict[object, int] = {}
    for tensor in tensors:
        for key, size in storages([tensor]).items():
            sizes[key] = max(sizes.get(key, 0), size)
    return sizes


def _no_sync(gpu: FakeGpu, *, unwatched: bool) -> AbstractContextManager[None]:
    # With parameters on the host, the host waits for the end of the step before reading them.
    return nullcontext() if unwatched else gpu.no_sync()


def give_gradients(parameters: Iterable[Tensor]) -> None:
    """Gradients without a backward pass."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _bytes(alive: Mapping[object, int], held: Mapping[str, Mapping[object, int]]) -> Bytes:
    """Live memory by purpose."""
    sizes = {what: sum(min(size, alive.get(key, 0)) for key, size in keys.items()) for what, keys in held.items()}
    counted = {field.name: sizes.get(field.name, 0) for field in fields(Bytes) if field.name != "rest"}
    return Bytes(**counted, rest=sum(alive.values()) - sum(counted.values()))


def _collectives(counter: CollectiveCounter) -> tuple[Collective, ...]:
    return tuple(
        Collective(
            call.name,
            call.ranks,
            None if call.name in UNEQUAL else call.payload,
            call.root,
            call.sends,
            call.receives,
        )
        for call in counter.calls
    )
