"""A model of Megatron-FSDP beside one process: `python -m tests.integrations.run_megatron KIND FOLDER` on each rank.

Prints the largest difference of the weights to those of one process after STEPS steps, after three more under FSDP2
from a checkpoint, and after three more under Megatron-FSDP from a checkpoint of FSDP2. With experts, after STEPS steps.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integrations import cuda_on_cpu  # noqa: F401
from tests.shared import message
from titan_muon import Expert, Hybrid, clip_grad_norm_, follow_megatron_fsdp
from titan_muon.engine.tensors.dtensor import held_indices

import megatron_fsdp  # isort: skip
from megatron_fsdp import experimental  # isort: skip

STEPS, MORE, CLIP = 20, 3, 0.3
OPTIONS: Mapping[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "decay_vectors": True}
EXPERT = Expert(orthogonalize="standard", ns_dtype="float32", wire_dtype="float32")
"""In bfloat16, Newton-Schulz makes 1e-4 of the rounding of sums over ranks after some steps."""


class AllReduce(torch.autograd.Function):
    """Sum over a group in the forward pass, in the backward pass, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.sums = group, backward
        return summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return summed(gradient, ctx.group) if ctx.sums else gradient, None, None, None


def summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.down(torch.relu(self.up(self.norm(x))))
        hidden = AllReduce.apply(self.norm(x), self.group, False, True)
        return x + AllReduce.apply(self.down(torch.relu(self.up(hidden))), self.group, True, False)

    def split(self, group: Any) -> None:
        """Tensor parallelism with the marks of Megatron-Core."""
        self.group = group
        for linear, mode, dim in ((self.up, "column", 0), (self.down, "row", 1)):
            for name, whole in list(linear.named_parameters()):
                part = nn.Parameter(whole.detach().chunk(group.size(), dim)[group.rank()].clone())
                part._tensor_parallel_mode = mode  # type: ignore[attr-defined]
                setattr(linear, name, part)


class Experts(nn.Module):
    """The sum of two experts, which get all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(index): nn.Linear(width, width, bias=False) for index in range(2)})
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + sum(expert(torch.relu(x)) for expert in self.experts.values())
        rank, (expert,) = self.group.rank(), self.experts.values()
        slots = torch.stack([x if slot == rank else torch.zeros_like(x) for slot in range(2)])
        tokens = AllReduce.apply(slots, self.group, True, True)
        return x + AllReduce.apply(expert(torch.relu(tokens)), self.group, True, True)[rank]

    def split(self, group: Any) -> None:
        """Expert parallelism: an expert on each rank of the group."""
        self.group = group
        self.experts = nn.ModuleDict({"0": self.experts[str(group.rank())]})


class Net(nn.Module):
    def __init__(self, seed: int, *, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.moe = Experts(8) if experts else nn.Identity()
        self.expert = 0
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = self.moe(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, place: int) -> Tensor:
    return torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(100 * step + place))


class Sharded:
    """A model under Megatron-FSDP or FSDP2, with a Hybrid."""

    def __init__(self, kind: str, seed: int, *, experts: bool = False, **options: Any) -> None:
        self.kind, self.net = kind, Net(seed, experts=experts)
        # Ranks with the same batch, next to each other.
        self.tensor_ranks = 2 if kind == "tp" else 1
        self.model: Any = _sharded(kind, self.net)
        self.optimizer = Hybrid(self.model, **OPTIONS, expert=EXPERT, muon=options)
        if kind != "fsdp2":
            follow_megatron_fsdp(self.optimizer, self.model)

    def step(self, number: int) -> None:
        loss = self.model(batch(number, dist.get_rank() // self.tensor_ranks))
        # Gloo has no PREMUL_SUM, so classic Megatron-FSDP and FSDP2 sum the gradients.
        (loss if self.kind.startswith("experimental") else loss / self.batches).backward()
        if not (classic := isinstance(self.model, megatron_fsdp.MegatronFSDP)) or self.model.model_auto_sync:
            clip_grad_norm_(self.net.parameters(), CLIP)
        elif classic:
            self.model.finish_grad_sync()
            clip_grad_norm_(self.net.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def batches(self) -> int:
        return dist.get_world_size() // self.tensor_ranks

    def parameters(self) -> Iterator[tuple[str, Any]]:
        for group in self.optimizer.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    def worst(self, single: nn.Module) -> float:
        """The largest difference to a whole model, over all ranks."""
        worst, whole = torch.zeros(()), dict(single.named_parameters())
        for name, parameter in self.parameters():
            expected = whole[name.replace("experts.0", f"experts.{self.net.expert}")].detach()
            for dim, indices in enumerate(held_indices(parameter)):
                expected = expected.index_select(dim, indices)
            if expected.numel():
                worst = torch.maximum(worst, (parameter.detach().to_local() - expected).abs().max())
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def copies(self) -> float:
        """How often all ranks together store the states of a parameter, by bytes."""
        # A rank without rows of a parameter may have no state of it.
        mine = {
            (name, key): (state.to_local().nbytes, state.nbytes)
            for name, parameter in self.parameters()
            for key, state in self.optimizer.state[parameter].items()
            if isinstance(state, DTensor)
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        whole = {name: size for rank in ranks for name, (_, size) in rank.items()}
        return sum(stored for rank in ranks for stored, _ in rank.values()) / sum(whole.values())

    def state(self) -> dict[str, Any]:
        """Weights and optimizer states, by the same names under every kind of sharding."""
        weights = dict(self.parameters())
        return {"model": weights, "optimizer": get_optimizer_state_dict(self.net, self.optimizer)}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self.net, self.optimizer, state["optimizer"])
        if isinstance(self.model, megatron_fsdp.MegatronFSDP):
            self.model.install_optimized_model_weights()
        for group in {getattr(p, "_mfsdp_parameter_group", None) for _, p in self.parameters()} - {None}:
            group.sync_model_weight_from_main_weight()


def _sharded(kind: str, net: Net) -> nn.Module:
    world = dist.get_world_size()
    if kind == "fsdp2":
        for module in (*net.blocks, net):
            fully_shard(module)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        return net
    if kind.startswith("experimental"):
        keep, flat = experimental.Replicate(), experimental.Flat()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        placements = experimental.Placements(["dp"], [flat], [flat], [flat])
        if "h" in kind.removeprefix("experimental"):
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))
            partial, outer = experimental.Partial(dist.ReduceOp.AVG), flat if kind.endswith("hfsdp") else keep
            placements = experimental.Placements(["outer", "dp"], [keep, flat], [partial, flat], [outer, flat])
        for module in (*net.blocks, net):
            experimental.fully_shard(module, mesh, placements)
        return net
    options: dict[str, Any] = {"zero_dp_strategy": 3 if kind in ("tp", "ep") else kind}
    shape, names = (world, 1), ("fsdp", "tp")
    if kind in ("hsdp", "hfsdp"):
        shape, names = (2, world // 2, 1), ("outer", "fsdp", "tp")
    if kind == "tp":
        shape = (world // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind == "tp":
        for block in net.blocks:
            block.split(mesh["tp"].get_group())
    if kind == "ep":
        experts = init_device_mesh("cpu", (world // 2, 2, 1), mesh_dim_names=("fsdp", "ep", "tp"))
        net.expert = experts["ep"].get_local_rank()
        net.moe.split(experts["ep"].get_group())
        options["expt_device_mesh"] = experts
    if kind in ("hsdp", "hfsdp"):
        options = {"zero_dp_strategy": 3, "dp_outer_dim": "outer"}
        options["outer_dp_sharding_strategy"] = "optim" if kind == "hfsdp" else "no_shard"
        options["hybrid_fsdp_group"] = mesh[("outer", "fsdp")]._flatten("both").get_group()
    return megatron_fsdp.fully_shard_model(
        net,
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        device=torch.device("cpu"),
        calculate_per_token_loss=True,
        **options,
    )


class OneProcess:
    """A Hybrid of the whole model on all batches."""

    def __init__(self, *, experts: bool) -> None:
        self.model, ranks = Net(1, experts=experts), range(dist.get_world_size())
        group = [dist.new_group([rank]) for rank in ranks][dist.get_rank()]
        self._optimizer = Hybrid(self.model, **OPTIONS, expert=EXPERT, process_group=group)

    def step(self, number: int, batches: int) -> None:
        for place in range(batches):
            (self.model(batch(number, place)) / batches).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()


def train(kind: str, folder: str) -> dict[str, float]:
    experts = kind == "ep"
    sharded = Sharded(kind, seed=1, experts=experts)
    single = OneProcess(experts=experts)
    found, step = {}, 0
    # Experts have one name on all ranks, so that a checkpoint would keep those of one rank.
    stages = ((kind, STEPS), *(() if experts else (("fsdp2", MORE), (f"{kind} again", MORE))))
    for stage, steps in stages:
        if step:
            sharded = Sharded(stage.removesuffix(" again"), seed=step, experts=experts)
            sharded.load(f"{folder}/{step}")
        for _ in range(steps):
            sharded.step(step)
            single.step(step, sharded.batches)
            step += 1
        found[stage] = sharded.worst(single.model)
        found[f"{stage}, copies"] = sharded.copies()
        sharded.save(f"{folder}/{step}")
    return found


def refusals() -> dict[str, str]:
    texts = {"overlap": message(lambda: Sharded("optim", 1, overlap="forward"))}
    net = Net(1)
    model: Any = _sharded("optim", net)
    optimizer = Hybrid(model, **OPTIONS, expert=EXPERT)
    before = [p.to_local().clone() for p in model.parameters()]
    texts["zeros"] = message(lambda: megatron_fsdp.fully_shard_optimizer(optimizer))
    follow_megatron_fsdp(optimizer, model)
    texts["zeros after"] = message(lambda: megatron_fsdp.fully_shard_optimizer(optimizer))
    texts["names"] = message(lambda: optimizer.add_param_group({"params": list(model.parameters())}))
    same = all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    texts["weights"] = "unchanged" if same else "changed"
    plain = Net(1)
    texts["plain"] = message(lambda: follow_megatron_fsdp(Hybrid(plain, expert=EXPERT), plain))
    if dist.get_world_size() == 4:
        texts["experimental hfsdp"] = message(lambda: Sharded("experimental hfsdp", 1))
    return texts


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, folder = sys.argv[1:]
    for name, found in (refusals() if kind == "refusals" else train(kind, folder)).items():
        if dist.get_rank() == 0:
            print(f"{name}: {found}", flush=True)
    dist.barrier()
    # Gloo's threads sometimes abort the interpreter's exit.
    os._exit(0)


if __name__ == "__main__":
    main()
