"""Muon's plan for the published models at 8 to 1,024 ranks, as a table: time, balance, calls, bytes, buffers.

Timed, in CPU seconds, are building the model without storage and planning. The step is played on a machine, beside the
limit: the larger of the least possible Newton-Schulz and the busiest link. What comes on top has three parts, of the
rank that is done last: Newton-Schulz of whole matrices, which do not divide evenly; momentum, apply and copies, which
any plan has, and without which the last ratio is; and waits, mostly the first matrix's way to its owner and the last
one's way back, when nothing is left to do. The least for whole matrices has all of this in it that no plan can be
without, if each matrix is orthogonalized on one rank: what a step takes beyond it is the planner's. Exposed is what the
step would be shorter by if links took no time; hidden are the gathers of `--overlap backward`, on the rank that has
most of them, or what `--overlap forward` leaves to the next forward. The tail is what comes after the last
Newton-Schulz, and the most that the next forward could hide; its share is of a training step: Muon's, behind a forward
and a backward of `TOKENS` tokens at `TRAINING_FLOPS`.

    python scripts/plan_scale.py                                   # all models, all worlds: some minutes
    python scripts/plan_scale.py --models qwen3_8b --ranks 64 128 --json plan_scale.json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import models as families  # noqa: F401 (registers them)
from titan_muon.titan import compat

compat.install()

from bounds import least_flops, least_seconds, least_sent

from titan_muon.options import Overlap
from titan_muon.plan import summarize
from titan_muon.plan.cost.timeline import timeline
from titan_muon.planning import planning_machine
from titan_muon.titan.dry_run.meta_model import build_meta_model
from titan_muon.titan.model.spec import model_spec
from titan_muon.titan.recipe import load

MODELS = ("qwen3_8b", "llama3_8b", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k2")
RANKS = (8, 32, 64, 128, 256, 512, 1024)
EXPERT_PARALLEL = {"qwen3_30b_a3b": (8, 8), "deepseek_v3": (8, 64), "kimi_k2": (8, 64)}
"""Expert-parallel degree below 64 ranks and from 64 ranks on."""
TOKENS = 8192
"""Tokens of a training step on each GPU."""
TRAINING_FLOPS = 400e12
"""Of a GPU in forward and backward, per second: 40 % of an H100's bfloat16 peak of 989 TFLOP/s."""


@dataclass(frozen=True)
class Numbers:
    """One row: a model planned on a world."""

    model: str
    ranks: int
    expert_parallel: int
    matrices: int
    orthogonalizations: int
    flops_over_bound: float
    collectives: int
    sent_mib_mean: float
    sent_mib_max: float
    sent_mib_bound: float
    buffers_gib: float
    work_gib: float
    step_ms: float
    newton_schulz_ms: float
    passes_ms: float
    waits_ms: float
    least_ms: float
    link_ms: float
    whole_ms: float
    exposed_ms: float
    hidden_ms: float
    tail_ms: float
    model_ms: float
    seconds: float

    @property
    def limit_ms(self) -> float:
        """What a step cannot be below."""
        return max(self.least_ms, self.link_ms)

    @property
    def ratio(self) -> float:
        """The step over its limit."""
        return self.step_ms / self.limit_ms

    @property
    def exposed_ratio(self) -> float:
        """What links add to the step, over its Newton-Schulz."""
        return self.exposed_ms / self.newton_schulz_ms

    @property
    def tail_ratio(self) -> float:
        """What comes after the last Newton-Schulz, over a training step."""
        return self.tail_ms / (self.model_ms + self.step_ms)

    @property
    def ratio_without_passes(self) -> float:
        """The same of the step without momentum, apply and copies."""
        return (self.step_ms - self.passes_ms) / self.limit_ms


@cache
def model_seconds(model: str) -> float:
    """Seconds that forward and backward of a recipe's model are taken to need on a GPU.

    Six FLOPs for each token and parameter that it is multiplied by: of experts those that it is routed to, of
    embeddings none. Attention scores and recomputation are left out, so that the model is rather too fast.
    """
    recipe = load(ROOT / f"configs/{model}_muon.toml", [])
    config = model_spec(recipe.model.name, recipe.model.flavor).model
    with torch.device("meta"):
        # TorchTitan counts the scores by this length.
        _, flops = config.get_nparams_and_flops(config.build(), seq_len=0)
    return TOKENS * flops / TRAINING_FLOPS


def plan_numbers(
    model: str,
    ranks: int,
    machine: str = "h100x8",
    expert_parallel: int | None = None,
    split_over: int = 1,
    tensor_parallel: int = 1,
    mode: str = "owner",
    overlap: Overlap = "none",
    replicas: int = 1,
) -> Numbers:
    """Plan the recipe `configs/<model>_muon.toml` on `ranks` GPUs of a machine.

    `expert_parallel` is by default what experts are laid out by in real runs; `split_over` and `overlap` are Muon's,
    and `mode` its option `tensor_parallel`, where that is the degree. `replicas` are HSDP's.
    """
    degree = EXPERT_PARALLEL.get(model, (1, 1))[ranks >= 64] if expert_parallel is None else expert_parallel
    given = ["--parallelism.expert_parallel_degree", str(degree), "--machine.name", machine]
    given += ["--muon.split_over", str(split_over), "--muon.tensor_parallel", mode, "--muon.overlap", overlap]
    given += ["--parallelism.tensor_parallel_degree", str(tensor_parallel)]
    # QK-clip is no part of a plan, and not every overlap goes with it.
    given += ["--parallelism.data_parallel_replicate_degree", str(replicas), "--qk_clip.mode", "off"]
    recipe = load(ROOT / f"configs/{model}_muon.toml", given)
    start = time.process_time()
    plan = build_meta_model(recipe, ranks, "cuda").plan
    assert plan is not None, f"{model} has Muon parameters"
    summary = summarize(plan)
    taken = time.process_time() - start
    played_on = planning_machine(recipe.machine, "cuda")
    played = timeline(plan, played_on, overlap=overlap)
    return Numbers(
        model=model,
        ranks=ranks,
        expert_parallel=degree,
        matrices=summary.muon_matrices,
        orthogonalizations=summary.orthogonalizations,
        flops_over_bound=summary.ns_flops_max / least_flops(plan),
        collectives=summary.collectives_per_step,
        sent_mib_mean=sum(cost.bytes_sent for cost in summary.ranks) / len(summary.ranks) / 2**20,
        sent_mib_max=summary.bytes_sent_max / 2**20,
        sent_mib_bound=least_sent(plan) / 2**20,
        buffers_gib=summary.buffer_bytes_max / 2**30,
        work_gib=summary.work_bytes_max / 2**30,
        step_ms=1e3 * played.last.seconds,
        newton_schulz_ms=1e3 * played.last.orthogonalize,
        passes_ms=1e3 * played.last.passes,
        waits_ms=1e3 * played.last.waits,
        least_ms=1e3 * played.least,
        link_ms=1e3 * played.link,
        whole_ms=1e3 * least_seconds(plan, played_on, played),
        exposed_ms=1e3 * played.exposed,
        hidden_ms=1e3 * (played.hidden or 0.0),
        tail_ms=1e3 * played.tail,
        model_ms=1e3 * model_seconds(model),
        seconds=taken,
    )


HEADER = (
    "| model | ranks | EP | matrices | step ms = Newton-Schulz + passes + waits | least Newton-Schulz, link ms "
    "| step / limit (without passes) | least for whole matrices ms, step / it "
    "| hidden ms | exposed ms (/ Newton-Schulz) "
    "| tail ms (/ training step) "
    "| busiest rank / least FLOPs | calls | sent MiB mean (max) "
    "| buffers + workspace GiB | plan s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(n: Numbers) -> str:
    """A line of the Markdown table."""
    once = "" if n.orthogonalizations == n.matrices else f" x {n.orthogonalizations / n.matrices:.2f}"
    return (
        f"| {n.model} | {n.ranks} | {n.expert_parallel} | {n.matrices:,}{once} "
        f"| {n.step_ms:,.1f} = {n.newton_schulz_ms:,.1f} + {n.passes_ms:,.1f} + {n.waits_ms:,.1f} "
        f"| {n.least_ms:,.1f}, {n.link_ms:,.1f} | {n.ratio:.2f} ({n.ratio_without_passes:.2f}) "
        f"| {n.whole_ms:,.1f}, {n.step_ms / n.whole_ms:.2f} "
        f"| {n.hidden_ms:,.1f} | {n.exposed_ms:,.1f} ({n.exposed_ratio:.3f}) | {n.tail_ms:,.1f} ({n.tail_ratio:.2%}) "
        f"| {n.flops_over_bound:.3f} | {n.collectives} | {n.sent_mib_mean:,.1f} ({n.sent_mib_max:,.1f}) "
        f"| {n.buffers_gib:.2f} + {n.work_gib:.2f} | {n.seconds:.0f} |"
    )


def main(
    models: tuple[str, ...] = MODELS,
    ranks: tuple[int, ...] = RANKS,
    machine: str = "h100x8",
    expert_parallel: int | None = None,
    split_over: int = 1,
    tensor_parallel: int = 1,
    mode: str = "owner",
    overlap: Overlap = "none",
    replicas: int = 1,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> list[Numbers]:
    """Print the table, a line as soon as it is known.

    Args:
        models: names of recipes, without `_muon.toml`.
        ranks: world sizes.
        machine: a named machine, as `machine.name` of a recipe.
        expert_parallel: degree, by default what experts are laid out by in real runs.
        split_over: most ranks that orthogonalize one matrix together.
        tensor_parallel: degree.
        mode: how what tensor parallelism cuts is orthogonalized, as `muon.tensor_parallel` of a recipe.
        overlap: `backward`: gathers begin in it, which is taken to be long enough to hide all but the last; `forward`:
            so is the next forward, to hide the last results.
        replicas: HSDP's, each of which is sharded over as many ranks as are left.
        json_file: file for the numbers.
    """
    print(HEADER, flush=True)
    numbers = []
    for model in models:
        for world in ranks:
            numbers.append(
                plan_numbers(
                    model, world, machine, expert_parallel, split_over, tensor_parallel, mode, overlap, replicas
                )
            )
            print(row(numbers[-1]), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(n) for n in numbers], indent=1) + "\n", encoding="utf-8")
    return numbers


if __name__ == "__main__":
    tyro.cli(main)
