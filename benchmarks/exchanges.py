"""A step by `all_to_all` and by `two_hops`, measured in turns on the ranks of torchrun, beside the model.

    torchrun --nnodes=16 --nproc_per_node=8 --rdzv_endpoint=HOST:29500 -m benchmarks.exchanges --device cuda --model gpu
    torchrun --nproc_per_node=8 -m benchmarks.exchanges --device cpu --ranks-per-node 4

`--ranks-per-node` makes nodes of the ranks of one machine, without their network.
"""

import argparse
import os
from functools import partial
from statistics import median

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import spread
from benchmarks.bench_step import combined, prepare, ratio, timed
from benchmarks.bounds import peers_and_messages
from benchmarks.contenders import MODELS, ours
from benchmarks.one_gpu.links import begin
from titan_muon.options import Machine
from titan_muon.planner.machine import planning_machine
from titan_muon.planner.timeline import timeline
from titan_muon.planner.walk import PlanCost

NAMES = ("all_to_all", "two_hops")


def main() -> None:
    """Measure; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device, rank, ranks = begin(options.device), dist.get_rank(), dist.get_world_size()
    if (size := options.ranks_per_node) is not None:
        os.environ |= {"LOCAL_RANK": str(rank % size), "LOCAL_WORLD_SIZE": str(size)}
    machine = Machine(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    mesh, rates = init_device_mesh(options.device, (ranks,)), planning_machine(machine, options.device)
    prepared = [prepare(name, partial(ours, name, machine=machine), MODELS[options.model], mesh) for name in NAMES]
    dist.all_gather_object(times := [None] * ranks, timed(prepared, options.repeats, device))
    turns, _ = combined(times)  # type: ignore[arg-type]
    head = "| exchange | ms | spread | / all_to_all | modelled ms | peers, messages | MB sent | calls |"
    lines = [f"{options.model}, {ranks} ranks, {machine.ranks_per_node} a node\n", head, "|---" + "|---:" * 7 + "|"]
    for index, (name, each) in enumerate(zip(NAMES, prepared, strict=True)):
        cost, mine = PlanCost.from_plan(each.optimizer.plan, rates), [turn[index] for turn in turns]  # type: ignore[attr-defined]
        modelled = timeline(each.optimizer.plan, rates, cost=cost).last.seconds  # type: ignore[attr-defined]
        measured = f"{1e3 * median(mine):.1f} | {spread(mine):.0%} | {ratio(turns, index, NAMES, 'all_to_all'):.3f}"
        counts = "{:,}, {:,}".format(*peers_and_messages(cost))
        counts += f" | {each.counts.bytes_sent / 1e6:.2f} | {each.counts.calls}"
        lines.append(f"| {name} | {measured} | {1e3 * modelled:.1f} | {counts} |")
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
