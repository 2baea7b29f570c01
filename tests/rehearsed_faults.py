"""Rehearses a tiny recipe with injected faults, one after the other, and prints the reported messages as JSON.

A separate process, because TorchTitan selects the device at import. Usage: python -m tests.rehearsed_faults FOLDER,
or FOLDER RANK FAULT FILE for the record of one rank with a fault of FAULTS.
"""

import json
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.rehearsal.fake_gpu import DeviceSync, fake_gpu
from tests import tiny

WORLD = 8
# A process can use FSDP with spmd_types in a single world only.
COMMON = {"parallelism__spmd_backend": "partial_dtensor", "data__tokenizer": "bytes"}


def main(folder: Path) -> dict[str, list[str]]:
    """Print the rehearsal's problem for each fault, and none for a sound step."""
    with fake_gpu() as gpu:
        from titan_muon.titan import compat

        compat.install()
        from titan_muon.step.stages import RankStages
        from torchtitan.components.loss import ChunkedLossWrapper

        from benchmarks.rehearsal.checks import Expected, collective_faults, faults
        from benchmarks.rehearsal.training import rehearse
        from titan_muon.comm.clip import GradientClip
        from titan_muon.comm.collectives import Collectives
        from titan_muon.comm.exchange import Exchange
        from titan_muon.state.host import Window
        from titan_muon.titan.dry_run.report import report

        kept: list[torch.Tensor] = []
        wait, gather, call, finish = Exchange.wait, Exchange.gather, ChunkedLossWrapper.__call__, RankStages.end

        def item(self: RankStages) -> None:
            self.buffers.buckets[0].stored[0].view.sum().item()
            finish(self)

        def keeps(self: Exchange, index: int) -> None:
            wait(self, index)
            kept.append(torch.empty(2**25, device="cuda"))

        def skips(self: Exchange, index: int) -> None:
            if index:
                gather(self, index)

        def grows(self: RankStages) -> None:
            kept.append(torch.empty(2**20, device="cuda"))
            finish(self)

        exchange, scale = Collectives.all_to_all, GradientClip.scale

        def moves(self: Collectives, output: Any, receives: Any, input: Any, sends: Any, group: Any) -> Any:
            place, peer = max((size, place) for place, size in enumerate(sends))[1], len(sends) - 1
            moved = list(sends)
            moved[place] -= sends[place] // 2
            moved[peer if place != peer else 0] += sends[place] // 2
            return exchange(self, output, receives, input, moved, group)

        def reads_norm(self: GradientClip, gradients: Any, norm: torch.Tensor) -> None:
            norm.item()
            scale(self, gradients, norm)

        def mixes(self: Any, *args: Any, **kwargs: Any) -> Any:
            weight = self.lm_head.weight
            weight + torch.zeros(weight.shape[-1], device="cuda")
            return call(self, *args, **kwargs)

        def seen(rank: int = 0, patch: AbstractContextManager[Any] | None = None, **values: object) -> Any:
            recipe = tiny.recipe(folder, **COMMON, **values)
            with nullcontext() if patch is None else patch:
                return rehearse(recipe, WORLD, rank, gpu, str(folder))

        def messages(patch: AbstractContextManager[Any], **values: object) -> list[str]:
            try:
                observation = seen(0, patch, **values)
            except (DeviceSync, RuntimeError) as error:
                return [f"{type(error).__name__}: {error}"]
            return list(faults(observation, expected))

        def beside(patch: AbstractContextManager[Any], **values: object) -> list[str]:
            """The faults of two ranks, the second with the patch."""
            return list(collective_faults([seen(**values), seen(4, patch, **values)]))

        def expect(**values: object) -> Expected:
            file = folder / "plan.json"
            gpu.has_meta_tensors = True
            with redirect_stdout(StringIO()):
                report(tiny.recipe(folder, **COMMON, **values), WORLD, full=False, json=str(file), device="cuda")
            return Expected.of(json.loads(file.read_text()))

        def right(**values: object) -> list[str]:
            plan = expect(**values)
            return list(faults(seen(plan.fullest, **values), plan))

        def offloaded_on_the_device() -> list[str]:
            plan, give_back = expect(optimizer__offload="state"), Window.give_back

            def keeps_load(self: Window) -> None:
                kept.append(torch.empty(2**25, device="cuda"))
                give_back(self)

            with mock.patch.object(Window, "give_back", keeps_load):
                return list(faults(seen(plan.fullest, optimizer__offload="state"), plan))

        expected, first = expect(), seen()
        parallel = {"parallelism__tensor_parallel_degree": 2, "loss__chunks": 8}
        return {
            "none": list(faults(first, expected)),
            "owned": right(placement__muon="owned"),
            "offload": right(optimizer__offload="state"),
            "offload owned": right(optimizer__offload="state", placement__muon="owned", adamw__state_dtype="bfloat16"),
            "offloaded and on the device": offloaded_on_the_device(),
            "host parameters": right(training__enable_cpu_offload="true"),
            "host parameters owned": right(training__enable_cpu_offload="true", placement__muon="owned"),
            "tensor parallel": right(**parallel),
            "clipped": right(model__name="deepseek_v3", model__flavor="tiny", qk_clip__mode="clip"),
            "same": list(collective_faults([first, seen(4)])),
            "item": messages(mock.patch.object(RankStages, "end", item)),
            "kept": messages(mock.patch.object(Exchange, "wait", keeps)),
            "skipped": list(collective_faults([first, seen(4, mock.patch.object(Exchange, "gather", skips))])),
            "grows": messages(mock.patch.object(RankStages, "end", grows)),
            "moved": beside(mock.patch.object(Collectives, "all_to_all", moves)),
            "norm read": messages(mock.patch.object(GradientClip, "scale", reads_norm)),
            "mixed": messages(mock.patch.object(ChunkedLossWrapper, "__call__", mixes), **parallel),
        }


OWNED = {"placement__muon": "owned"}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2, "muon__state": "owner"}
FAULTS: dict[str, dict[str, object]] = {
    "owned": OWNED,
    "other owners": OWNED,
    "replicas": REPLICAS,
    "report first": REPLICAS,
}
"""Values of the recipe for each fault; two faults have none."""


def write_record(folder: Path, rank: int, fault: str, file: Path) -> None:
    """Write the record of a rank with a fault of FAULTS."""
    with fake_gpu() as gpu:
        from titan_muon.titan import compat

        compat.install()
        from titan_muon.step.stages import RankStages

        from benchmarks.rehearsal.training import rehearse
        from titan_muon.comm.report import FaultReport
        from titan_muon.owned.comm import OwnerCollectives

        broadcast, send, begin = OwnerCollectives._broadcast, FaultReport.send, RankStages.begin

        def shifted(self: OwnerCollectives, part: torch.Tensor, owner: int) -> Any:
            return broadcast(self, part, (owner + 1) % self.group.size())

        def begins(self: RankStages, step: Any) -> None:
            begin(self, step)
            send(self.report)

        def unsent(self: FaultReport) -> None:
            """Sent at the begin of the step."""

        with ExitStack() as stack:
            if fault == "other owners":
                stack.enter_context(mock.patch.object(OwnerCollectives, "_broadcast", shifted))
            if fault == "report first":
                stack.enter_context(mock.patch.object(RankStages, "begin", begins))
                stack.enter_context(mock.patch.object(FaultReport, "send", unsent))
            recipe = tiny.recipe(folder, **COMMON, **FAULTS[fault])
            rehearse(recipe, WORLD, rank, gpu, str(folder)).write(file)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        write_record(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        print(json.dumps(main(Path(sys.argv[1]))))
