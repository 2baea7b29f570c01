"""Rehearses a tiny recipe with injected faults, one after the other, and prints the reported messages as JSON.

A separate process, because TorchTitan selects the device at import. Usage: python -m tests.rehearsed_faults FOLDER.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
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
        from titan_muon.trainer.torchtitan import compat

        compat.install()
        from torchtitan.components.loss import ChunkedLossWrapper

        from benchmarks.rehearsal.checks import Expected, collective_faults, faults
        from benchmarks.rehearsal.training import rehearse
        from titan_muon.engine.engine import Engine
        from titan_muon.engine.exchange.exchange import Exchange
        from titan_muon.trainer.dry_run.report import report
        from titan_muon.trainer.recipe.command_line import Command

        kept: list[torch.Tensor] = []
        wait, gather, call, finish = Exchange.wait, Exchange.gather, ChunkedLossWrapper.__call__, Engine.run

        def item(self: Engine, *args: Any) -> None:
            finish(self, *args)
            self.rank.report._codes.sum().item()

        def keeps(self: Exchange, index: int) -> None:
            wait(self, index)
            kept.append(torch.empty(2**25, device="cuda"))

        def skips(self: Exchange, index: int) -> None:
            if index:
                gather(self, index)

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

        def expect(**values: object) -> Expected:
            file = folder / "plan.json"
            gpu.has_meta_tensors = True
            with redirect_stdout(StringIO()):
                recipe = tiny.recipe(folder, **COMMON, **values)
                report(Command(recipe=recipe, world_size=WORLD, json=str(file), device="cuda"))
            return Expected.of(json.loads(file.read_text()))

        def right(**values: object) -> list[str]:
            plan = expect(**values)
            return list(faults(seen(plan.fullest, **values), plan))

        expected, first = expect(), seen()
        parallel = {"parallelism__tensor_parallel_degree": 2, "loss__chunks": 8}
        return {
            "none": list(faults(first, expected)),
            "owned": right(placement__muon="owned"),
            "offload": right(optimizer__offload="state"),
            "offload owned": right(optimizer__offload="state", placement__muon="owned", adamw__state_dtype="bfloat16"),
            "host parameters": right(training__enable_cpu_offload="true"),
            "host parameters owned": right(training__enable_cpu_offload="true", placement__muon="owned"),
            "tensor parallel": right(**parallel),
            "clipped": right(model__name="deepseek_v3", model__flavor="tiny", qk_clip__mode="clip"),
            "same": list(collective_faults([first, seen(4)])),
            "item": messages(mock.patch.object(Engine, "run", item)),
            "kept": messages(mock.patch.object(Exchange, "wait", keeps)),
            "skipped": list(collective_faults([first, seen(4, mock.patch.object(Exchange, "gather", skips))])),
            "mixed": messages(mock.patch.object(ChunkedLossWrapper, "__call__", mixes), **parallel),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
