"""What gathers in backward, or updates in forward, cost a training step: a recipe with and without, in CPU time.

    python benchmarks/bench_training.py --nproc 4 --config configs/qwen_moe_muon.toml --steps 24

Further keys are the recipe's, as train.py takes them. Each process has one thread, talks over gloo, and trains the
recipe from the same weights on the same batches: without, with either, and once more without, which shows what two
equal trainings differ by here. A step goes from the batch to the applied update; steps take turns, so that whatever
else the machine does hits all alike. What waits takes no CPU time.
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

# Run as a script, a file finds only its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models  # noqa: F401 (registers the families)
from benchmarks.bench_step import barrier, start
from titan_muon.muon import Muon
from titan_muon.titan.recipe import Recipe, RecipeError, check_degrees, load

OVERLAPS = ("none", "backward", "forward", "none")
"""Of the trainings that are compared. The first is what others are compared with, the last a control."""
QUIET = ("--validator.enable", "false", "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false")
WARM_UP = 2
"""Steps of each that are not timed: the first makes the momentum."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Taken:
    """Seconds of a training step: CPU time until the optimizers' step and in it, of one rank or of all together, and
    the wall time of the rank, or of the slowest."""

    passes: float
    step: float
    wall: float

    @property
    def cpu(self) -> float:
        """CPU time of the whole training step."""
        return self.passes + self.step


@dataclass(frozen=True)
class Sent:
    """What Muon sends in a training step: collectives and bytes of all ranks, and the collectives before its step."""

    calls: int
    bytes_sent: int
    in_backward: int


@dataclass(frozen=True)
class Figures:
    """Training with one `muon.overlap`: its steps in order, what each of them sends, and whether all that is trained
    has the same bits as with the first."""

    overlap: str
    taken: tuple[Taken, ...]
    sent: Sent
    bitwise: bool


class Trainee:
    """A recipe's trainer on this rank, and what was seen of its last step."""

    def __init__(self, recipe: Recipe, folder: str) -> None:
        from titan_muon.titan import compat
        from titan_muon.titan.run.runs import Run
        from titan_muon.titan.run.signals import StopSignals
        from titan_muon.titan.run.trainer_config import trainer_config

        compat.forget_meshes()
        trainer = trainer_config(recipe, Run(folder), dist.get_world_size()).build()
        trainer.stop, trainer.stopped, trainer.first_step = StopSignals(None), False, False
        # A step that is reported reads the loss, and writes.
        trainer.metrics_processor.should_log = lambda step: False
        self.trainer = trainer
        self.muon = next(each for each in trainer.optimizers if isinstance(each, Muon))
        self.batches = trainer.batch_generator(trainer.dataloader)
        self.sent = Sent(0, 0, 0)
        trainer.optimizers.register_step_pre_hook(lambda *_: self._begin_step())

    def _begin_step(self) -> None:
        self._cpu_before, self._calls_before = time.process_time(), self.muon.exchange.traffic.calls

    def train_step(self) -> Taken:
        """A training step, all ranks together."""
        traffic = self.muon.exchange.traffic
        calls, sent = traffic.calls, traffic.bytes_sent
        self.trainer.step += 1
        self.trainer.gc_handler.run(self.trainer.step)
        barrier(CPU)
        begin, cpu = time.perf_counter(), time.process_time()
        self.trainer.train_step(self.batches)
        wall, after = time.perf_counter() - begin, time.process_time()
        self.sent = Sent(traffic.calls - calls, traffic.bytes_sent - sent, self._calls_before - calls)
        return Taken(self._cpu_before - cpu, after - self._cpu_before, wall)

    def trained(self) -> list[torch.Tensor]:
        """What this rank has of all parameters and of Muon's momentum."""
        self.muon.finish_step()
        parameters = [parameter for part in self.trainer.model_parts for parameter in part.parameters()]
        momentum = [self.muon.state[p]["momentum_buffer"] for group in self.muon.param_groups for p in group["params"]]
        return [getattr(each, "to_local", each.detach)() for each in (*parameters, *momentum)]


def run(recipes: Sequence[Recipe], steps: int, folder: str) -> list[Figures]:
    """The figures of each recipe, the same on every rank."""
    trainees = [Trainee(recipe, folder) for recipe in recipes]
    for _ in range(WARM_UP):
        for trainee in trainees:
            trainee.train_step()
    taken: list[list[Taken]] = [[] for _ in trainees]
    for step in range(steps):
        for place in range(len(trainees)):
            index = (step + place) % len(trainees)
            taken[index].append(trainees[index].train_step())
    expected = trainees[0].trained()
    bits = [same_bits(trainee.trained(), expected) for trainee in trainees]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (taken, [trainee.sent for trainee in trainees], bits))
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


def together(ranks: Sequence[Taken]) -> Taken:
    """A step of all ranks."""
    return Taken(sum(each.passes for each in ranks), sum(each.step for each in ranks), max(each.wall for each in ranks))


def all_sent(ranks: Sequence[Sent]) -> Sent:
    """What all ranks send."""
    return Sent(*(sum(values) for values in zip(*(asdict(each).values() for each in ranks), strict=True)))


@dataclass(frozen=True)
class Ratio:
    """Of paired steps: the median of their ratios, and the quartiles."""

    lower: float
    median: float
    upper: float


def ratio(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """These over those, pair by pair; at least two of each."""
    return Ratio(*quantiles((this / that for this, that in zip(these, those, strict=True)), n=4, method="inclusive"))


def table(rows: Sequence[Figures]) -> str:
    """Markdown; ratios are to the first row."""
    head = ["overlap", "CPU ms", "passes", "step", "ms", "Muon's calls", "in backward", "bytes", "bits"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        times = [1e3 * median(getattr(each, name) for each in row.taken) for name in ("cpu", "passes", "step", "wall")]
        sent = (row.sent.calls, row.sent.in_backward, row.sent.bytes_sent)
        bits = "equal" if row.bitwise else "differ"
        lines.append([row.overlap, *(f"{value:,.1f}" for value in times), *(f"{count:,}" for count in sent), bits])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratios(rows: Sequence[Figures]) -> str:
    """A line for each row but the first."""
    lines = []
    for row in rows[1:]:
        found = ratio([each.cpu for each in row.taken], [each.cpu for each in rows[0].taken])
        lines.append(
            f"CPU time of a training step, {row.overlap} / {rows[0].overlap}: median {found.median:.4f} of "
            f"{len(row.taken)} pairs, quartiles {found.lower:.4f} to {found.upper:.4f}"
        )
    return "\n".join(lines)


def recipes(config: Path, keys: Sequence[str], folder: str) -> list[Recipe]:
    """The recipe with each of OVERLAPS. Raises RecipeError."""
    given = [*QUIET, *keys, "--dump_folder", folder, "--muon.overlap"]
    return [load(config, [*given, overlap]) for overlap in OVERLAPS]


def worker(rank: int, nproc: int, folder: str, config: Path, keys: Sequence[str], steps: int) -> None:
    """One process; rank 0 leaves the figures in the folder."""
    here, there = str(rank), str(nproc)
    os.environ.update(RANK=here, LOCAL_RANK=here, WORLD_SIZE=there, LOCAL_WORLD_SIZE=there)
    start(rank, nproc, folder, "cpu")
    from titan_muon.titan import compat

    # Before TorchTitan is imported, which takes its device then.
    compat.install()
    from titan_muon.titan.run.console import set_up_logging

    set_up_logging()
    # What a run says of itself is said by both trainers.
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
    """What rank 0 wrote."""
    return [
        Figures(row["overlap"], tuple(Taken(**each) for each in row["taken"]), Sent(**row["sent"]), row["bitwise"])
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
        given = (arguments.nproc, folder, arguments.config, tuple(keys), arguments.steps)
        mp.spawn(worker, given, arguments.nproc)
        rows = read(Path(folder, "figures").read_text(encoding="utf-8"))
    name = " ".join([arguments.config.stem, *keys])
    print(f"{name}, {arguments.nproc} ranks, medians of {arguments.steps} training steps\n")
    print(f"{table(rows)}\n\n{ratios(rows)}")
    return rows


if __name__ == "__main__":
    main(*tyro.cli(Arguments, return_unknown_args=True))
