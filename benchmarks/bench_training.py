"""Cost of gathers in backward, and of updates in forward, for a training step of a recipe, in CPU time.

    python benchmarks/bench_training.py --nproc 4 --config configs/qwen_moe_muon.toml --steps 24

Further keys are the recipe's, as for train.py. Each process has one thread, talks over gloo, and trains the recipe from
the same weights on the same batches: without overlap, with each overlap, and again without overlap as a control. A step
goes from the batch to the applied update. Steps take turns, so that other load on the machine affects all of them
equally. Waiting takes no CPU time.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

# A script finds only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models  # noqa: F401 (registers the families)
from benchmarks.bench_step import barrier, start
from titan_muon.engine.tensors.process_groups import forget_meshes
from titan_muon.muon import Muon
from titan_muon.trainer.recipe import Recipe, RecipeError, check_degrees, load

OVERLAPS = ("none", "forward", "none")
"""Compared values of `muon.overlap`: first the baseline, last the control."""
QUIET = ("--validator.enable", "false", "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false")
WARM_UP = 2
"""Untimed steps: the first makes the momentum."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Times:
    """Seconds of a training step of a rank, or of all ranks: CPU time before and in the optimizers' step summed, and
    the slowest wall time.
    """

    passes: float
    step: float
    wall: float

    @property
    def cpu(self) -> float:
        """CPU time of the whole training step."""
        return self.passes + self.step


@dataclass(frozen=True)
class Sent:
    """Traffic of Muon in a training step: collectives and bytes of all ranks, and collectives before the step."""

    calls: int
    bytes_sent: int
    in_backward: int


@dataclass(frozen=True)
class Figures:
    """Training with a value of `muon.overlap`: times of the steps, traffic, and whether all trained tensors are bitwise
    equal to the baseline's.
    """

    overlap: str
    times: tuple[Times, ...]
    sent: Sent
    bitwise: bool


class Trainee:
    """Trainer of a recipe on this rank, with records of the last step."""

    def __init__(self, recipe: Recipe, folder: str) -> None:
        from titan_muon.trainer.run.runs import Run
        from titan_muon.trainer.run.trainer_config import trainer_config

        forget_meshes()
        trainer = trainer_config(recipe, Run(folder), dist.get_world_size()).build()
        trainer.is_first_step = False
        # A reported step reads the loss and writes.
        trainer.metrics_processor.should_log = lambda step: False
        self.trainer = trainer
        self.muon = next(item for item in trainer.optimizers if isinstance(item, Muon))
        self.batches = trainer.batch_generator(trainer.dataloader)
        self.sent = Sent(0, 0, 0)
        trainer.optimizers.register_step_pre_hook(lambda *_: self._begin_step())

    def _begin_step(self) -> None:
        self._cpu_before, self._calls_before = time.process_time(), self.muon.exchange.traffic.calls

    def train_step(self) -> Times:
        """A training step, with all ranks in step."""
        traffic = self.muon.exchange.traffic
        calls, sent = traffic.calls, traffic.bytes_sent
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        barrier(CPU)
        begin, cpu = time.perf_counter(), time.process_time()
        self.trainer.train_step(self.batches)
        wall, after = time.perf_counter() - begin, time.process_time()
        self.sent = Sent(traffic.calls - calls, traffic.bytes_sent - sent, self._calls_before - calls)
        return Times(self._cpu_before - cpu, after - self._cpu_before, wall)

    def trained(self) -> list[torch.Tensor]:
        """This rank's parameters and Muon's momentum."""
        self.muon.finish_step()
        parameters = [parameter for part in self.trainer.model_parts for parameter in part.parameters()]
        momentum = [self.muon.state[p]["momentum_buffer"] for group in self.muon.param_groups for p in group["params"]]
        return [getattr(item, "to_local", item.detach)() for item in (*parameters, *momentum)]


def run(recipes: Sequence[Recipe], steps: int, folder: str) -> list[Figures]:
    """Figures of each recipe, equal on every rank."""
    trainees = [Trainee(recipe, folder) for recipe in recipes]
    for _ in range(WARM_UP):
        for trainee in trainees:
            trainee.train_step()
    times: list[list[Times]] = [[] for _ in trainees]
    for step in range(steps):
        for place in range(len(trainees)):
            index = (step + place) % len(trainees)
            times[index].append(trainees[index].train_step())
    expected = trainees[0].trained()
    bits = [same_bits(trainee.trained(), expected) for trainee in trainees]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (times, [trainee.sent for trainee in trainees], bits))
    for trainee in trainees:
        trainee.trainer.close()
    return [
        Figures(
            recipe.muon.overlap,
            tuple(together([rank[0][index][step] for rank in ranks]) for step in range(steps)),
            all_sent([rank[1][index] for rank in ranks]),
            all(rank[2][index] for rank in ranks),
        )
        for index, recipe in enumerate(recipes)
    ]


def same_bits(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal, pair by pair."""
    return all(torch.equal(this, that) for this, that in zip(these, those, strict=True))


def together(ranks: Sequence[Times]) -> Times:
    """A step summed over ranks."""
    return Times(sum(item.passes for item in ranks), sum(item.step for item in ranks), max(item.wall for item in ranks))


def all_sent(ranks: Sequence[Sent]) -> Sent:
    """Traffic summed over ranks."""
    return Sent(*(sum(values) for values in zip(*(asdict(item).values() for item in ranks), strict=True)))


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the ratios of paired steps."""

    lower: float
    median: float
    upper: float


def ratio(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """Ratios pair by pair; at least two pairs."""
    return Ratio(*quantiles((this / that for this, that in zip(these, those, strict=True)), n=4, method="inclusive"))


def table(rows: Sequence[Figures]) -> str:
    """Markdown; ratios are to the first row."""
    head = ["overlap", "CPU ms", "passes", "step", "ms", "Muon's calls", "in backward", "bytes", "bits"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        times = [1e3 * median(getattr(item, name) for item in row.times) for name in ("cpu", "passes", "step", "wall")]
        sent = (row.sent.calls, row.sent.in_backward, row.sent.bytes_sent)
        bits = "equal" if row.bitwise else "differ"
        lines.append([row.overlap, *(f"{value:,.1f}" for value in times), *(f"{count:,}" for count in sent), bits])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratios(rows: Sequence[Figures]) -> str:
    """A line for each row but the first."""
    lines = []
    for row in rows[1:]:
        measured = ratio([item.cpu for item in row.times], [item.cpu for item in rows[0].times])
        lines.append(
            f"CPU time of a training step, {row.overlap} / {rows[0].overlap}: median {measured.median:.4f} of "
            f"{len(row.times)} pairs, quartiles {measured.lower:.4f} to {measured.upper:.4f}"
        )
    return "\n".join(lines)


def recipes(config: Path, keys: Sequence[str], folder: str) -> list[Recipe]:
    """The recipe with each of OVERLAPS. Raises RecipeError."""
    flags = [*QUIET, *keys, "--dump_folder", folder, "--muon.overlap"]
    return [load(config, [*flags, overlap]) for overlap in OVERLAPS]


def worker(rank: int, nproc: int, folder: str, config: Path, keys: Sequence[str], steps: int) -> None:
    """A process; rank 0 writes the figures to the folder."""
    own_rank, world = str(rank), str(nproc)
    os.environ.update(RANK=own_rank, LOCAL_RANK=own_rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    start(rank, nproc, folder, "cpu")
    from titan_muon.trainer.torchtitan import compat

    # Before the import of TorchTitan, which copies the device.
    compat.install()
    from titan_muon.trainer.run.console import set_up_logging

    set_up_logging()
    # Both trainers would repeat a run's messages.
    logging.getLogger().setLevel(logging.WARNING)
    rows = run(recipes(config, keys, folder), steps, folder)
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Arguments:
    """Compare training with gathers in backward to training without."""

    nproc: int = 4
    """Processes."""
    config: Path = Path(__file__).resolve().parents[1] / "configs" / "qwen_moe_muon.toml"
    """The recipe."""
    steps: int = 24
    """Timed training steps of each."""

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("steps", 2)):
            if getattr(self, name) < least:
                raise SystemExit(f"--{name} must be at least {least}")


def read(text: str) -> list[Figures]:
    """Figures written by rank 0."""
    return [
        Figures(row["overlap"], tuple(Times(**item) for item in row["times"]), Sent(**row["sent"]), row["bitwise"])
        for row in json.loads(text)
    ]


def main(arguments: Arguments, keys: Sequence[str] = ()) -> list[Figures]:
    """Run the processes and print the table."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for recipe in recipes(arguments.config, keys, folder):
                check_degrees(recipe, arguments.nproc)
        except RecipeError as error:
            raise SystemExit(f"error: {error}") from error
        worker_arguments = (arguments.nproc, folder, arguments.config, tuple(keys), arguments.steps)
        mp.spawn(worker, worker_arguments, arguments.nproc)
        rows = read(Path(folder, "figures").read_text(encoding="utf-8"))
    name = " ".join([arguments.config.stem, *keys])
    print(f"{name}, {arguments.nproc} ranks, medians of {arguments.steps} training steps\n")
    print(f"{table(rows)}\n\n{ratios(rows)}")
    return rows


if __name__ == "__main__":
    main(*tyro.cli(Arguments, return_unknown_args=True))
