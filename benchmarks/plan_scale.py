"""Muon's plan for the published models at 8 to 16,384 ranks, as a table: time, balance, calls, bytes, buffers.

`plan s`: CPU seconds to build the model without storage and to plan. All step times are modelled, on the slowest rank:

- limit: the larger of the balanced Newton-Schulz time and the busiest link.
- Newton-Schulz: exceeds the balanced time because whole matrices do not divide evenly.
- passes: momentum, apply and copies. The last ratio is without passes.
- waits: mostly the gather of the first matrix and the return of the last.
- least for whole matrices: lower bound if each matrix is orthogonalized on one rank. The rest is the planner's loss.
- exposed: reduction of the step time with infinitely fast links.
- hidden: returns under `--overlap forward`, behind the step.
- tail: time after the last Newton-Schulz, the most that the next forward could hide, also as a share of a training step
with `TOKENS` tokens at `TRAINING_FLOPS`.

    python -m benchmarks.plan_scale                                   # all models, all worlds: some minutes
    python -m benchmarks.plan_scale --models qwen3_8b --ranks 64 128 --json plan_scale.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import tyro

import models as families  # noqa: F401 (registers them)
from benchmarks.bounds import least_flops, least_seconds, least_sent, peers_and_messages
from titan_muon.engine.layout.types import Plan
from titan_muon.engine.layout.work import Elements
from titan_muon.engine.planning import PlanRequest, plan_by_rule
from titan_muon.options import MuonOptions, Overlap
from titan_muon.planner.machine import planning_machine
from titan_muon.planner.summary import summarize
from titan_muon.planner.timeline import timeline
from titan_muon.planner.walk import PlanCost
from titan_muon.trainer.dry_run.meta_model import build_meta_model
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import load

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("qwen3_8b", "llama3_8b", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k2")
RANKS = (8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
EXPERT_PARALLEL = {"qwen3_30b_a3b": (8, 8, 64), "deepseek_v3": (8, 64, 64), "kimi_k2": (8, 64, 64)}
"""Expert-parallel degree below 64 ranks, from 64 ranks on, and from 4,096 on."""
TOKENS = 8192
"""Tokens of a training step per GPU."""
TRAINING_FLOPS = 400e12
"""FLOP/s of a GPU in forward and backward: 40 % of an H100's bfloat16 peak of 989 TFLOP/s."""


@dataclass(frozen=True)
class Numbers:
    """A row: a model planned on a world."""

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
    host_ms: float
    whole_ms: float
    exposed_ms: float
    hidden_ms: float
    tail_ms: float
    model_ms: float
    seconds: float
    overlap: Overlap
    replicas: int
    exchanges: tuple[str, ...]
    peers: int
    messages: int
    rule_ms: float

    @property
    def limit_ms(self) -> float:
        """Lower bound of the step."""
        return max(self.least_ms, self.link_ms)

    @property
    def ratio_without_passes(self) -> float:
        """The step without momentum, apply and copies over the limit."""
        return (self.step_ms - self.passes_ms) / self.limit_ms


@cache
def model_seconds(model: str) -> float:
    """Estimated seconds of forward and backward of a recipe's model on a GPU.

    Six FLOPs per token and parameter of a matrix product: routed experts only, no embeddings. Attention scores and
    recomputation are left out, so the estimate is rather too short.
    """
    recipe = load(ROOT / f"configs/{model}_muon.toml", [])
    config = model_spec(recipe.model.name, recipe.model.flavor).model
    with torch.device("meta"):
        # TorchTitan counts the scores by this length.
        _, flops = config.get_nparams_and_flops(config.build(), 0)
    return TOKENS * flops / TRAINING_FLOPS


def plan_numbers(
    model: str,
    ranks: int,
    machine: str = "h100x8",
    expert_parallel: int | None = None,
    tensor_parallel: int = 1,
    overlap: Overlap = "none",
    replicas: int = 1,
    ranks_per_node: int | None = None,
) -> Numbers:
    """Plan the recipe `configs/<model>_muon.toml` on `ranks` GPUs of a machine.

    `expert_parallel` defaults to EXPERT_PARALLEL. `overlap` is an option of Muon. `replicas`: HSDP's replicas.
    """
    degrees = EXPERT_PARALLEL.get(model, (1, 1, 1))
    degree = degrees[(ranks >= 64) + (ranks >= 4096)] if expert_parallel is None else expert_parallel
    flags = ["--parallelism.expert_parallel_degree", str(degree), "--machine.name", machine]
    flags += [] if ranks_per_node is None else ["--machine.ranks_per_node", str(ranks_per_node)]
    flags += ["--muon.overlap", overlap, "--parallelism.tensor_parallel_degree", str(tensor_parallel)]
    # QK-clip does not change the plan and excludes `forward`.
    flags += ["--parallelism.data_parallel_replicate_degree", str(replicas), "--qk_clip.mode", "off"]
    recipe = load(ROOT / f"configs/{model}_muon.toml", flags)
    start = time.process_time()
    plan = build_meta_model(recipe, ranks, "cuda").plan
    assert plan is not None, f"{model} has Muon parameters"
    rates = planning_machine(recipe.machine, "cuda")
    cost = PlanCost.from_plan(plan, rates)
    summary = summarize(plan, cost)
    seconds = time.process_time() - start
    played = timeline(plan, rates, overlap=overlap, cost=cost)
    peers, messages = peers_and_messages(cost)
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
        host_ms=1e3 * played.host,
        link_ms=1e3 * played.link,
        whole_ms=1e3 * least_seconds(plan, rates, played),
        exposed_ms=1e3 * played.exposed,
        hidden_ms=1e3 * (played.hidden or 0.0),
        tail_ms=1e3 * played.tail,
        model_ms=1e3 * model_seconds(model),
        seconds=seconds,
        overlap=overlap,
        replicas=replicas,
        exchanges=tuple(sorted({bucket.exchange for bucket in plan.buckets})),
        peers=peers,
        messages=messages,
        rule_ms=1e3 * timeline(by_rule(plan, overlap), rates, overlap=overlap).last.seconds,
    )


def by_rule(plan: Plan, overlap: Overlap) -> Plan:
    """The plan of the same parameters by `planner = "rule"`."""
    works = {(m.parameter, m.rows, m.cols): plan.works[m.work] for m in plan.matrices}
    options = MuonOptions(overlap=overlap, planner="rule")
    return replace(
        plan_by_rule(PlanRequest(plan.parameters, lambda *key: works[key], options, Elements())), passes=plan.passes
    )


HEADER = (
    "| model | ranks | EP | matrices | step ms = Newton-Schulz + passes + waits | step by the rule "
    "| least Newton-Schulz, link ms "
    "| step / limit (without passes) | least for whole matrices ms, step / it "
    "| hidden ms | exposed ms (/ Newton-Schulz) "
    "| tail ms (/ training step) "
    "| busiest rank / least FLOPs | calls | peers, messages | sent MiB mean (max) "
    "| buffers + workspace GiB | plan s |\n"
    "|---" + "|---" * 17 + "|"
)


def row(n: Numbers) -> str:
    """A line of the Markdown table."""
    once = "" if n.orthogonalizations == n.matrices else f" x {n.orthogonalizations / n.matrices:.2f}"
    return (
        f"| {n.model} | {n.ranks} | {n.expert_parallel} | {n.matrices:,}{once} "
        f"| {n.step_ms:,.1f} = {n.newton_schulz_ms:,.1f} + {n.passes_ms:,.1f} + {n.waits_ms:,.1f} | {n.rule_ms:,.1f} "
        f"| {n.least_ms:,.1f}, {n.link_ms:,.1f} | {n.step_ms / n.limit_ms:.2f} ({n.ratio_without_passes:.2f}) "
        f"| {n.whole_ms:,.1f}, {n.step_ms / n.whole_ms:.2f} "
        f"| {n.hidden_ms:,.1f} | {n.exposed_ms:,.1f} ({n.exposed_ms / n.newton_schulz_ms:.3f}) "
        f"| {n.tail_ms:,.1f} ({n.tail_ms / (n.model_ms + n.step_ms):.2%}) "
        f"| {n.flops_over_bound:.3f} | {n.collectives} | {n.peers:,}, {n.messages:,} "
        f"| {n.sent_mib_mean:,.1f} ({n.sent_mib_max:,.1f}) "
        f"| {n.buffers_gib:.2f} + {n.work_gib:.2f} | {n.seconds:.0f} |"
    )


def origin() -> dict[str, object]:
    """Date, and commit of this checkout; "" without git."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"date": date.today().isoformat(), "commit": commit}


def main(
    models: tuple[str, ...] = MODELS,
    ranks: tuple[int, ...] = RANKS,
    machine: str = "h100x8",
    expert_parallel: int | None = None,
    tensor_parallel: int = 1,
    overlap: Overlap = "none",
    replicas: int = 1,
    ranks_per_node: int | None = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> list[Numbers]:
    """Print the table, line by line.

    Args:
        models: names of recipes, without `_muon.toml`.
        ranks: world sizes.
        machine: a named machine, as `machine.name` of a recipe.
        expert_parallel: degree, by default as in real runs.
        tensor_parallel: degree.
        overlap: `forward` hides the last returns.
        replicas: HSDP replicas, each sharded over an equal share of the ranks.
        ranks_per_node: by default the machine's.
        json_file: file for the numbers, with date, commit, machine and command.
    """
    print(HEADER, flush=True)
    numbers = []
    for model in models:
        for world in ranks:
            layout = expert_parallel, tensor_parallel, overlap, replicas, ranks_per_node
            numbers.append(plan_numbers(model, world, machine, *layout))
            print(row(numbers[-1]), flush=True)
    if json_file is not None:
        command = " ".join(["python -m benchmarks.plan_scale", *sys.argv[1:]])
        document = {**origin(), "machine": f"{machine}, modelled", "command": command}
        document["rows"] = [asdict(n) for n in numbers]
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return numbers


if __name__ == "__main__":
    tyro.cli(main)
