"""Small trainers, right ones and wrong ones, for the audit: a table of kinds, ranks and expected codes."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from titan_muon import Hybrid, apply_in_forward, own
from titan_muon.audit import Audit, Report
from titan_muon.options import Split

SHAPES = ((16, 48), (24, 64), (32, 40))
"""Width and hidden width by seed."""
VOCABULARY, STEPS = 20, 6


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.q = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = torch.softmax(self.q(y) @ y.transpose(-1, -2), -1) @ y
        return x + mixed + self.down(torch.relu(self.up(y)))


class Net(nn.Module):
    def __init__(self, seed: int, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width, hidden = SHAPES[seed % 3]
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Stack(nn.Module):
    """Experts with dense gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.einsum("bsd,edk->bsk", x, self.weight))


def batch(seed: int, step: int, place: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(10_000 * seed + 100 * step + place)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=draw)
    noise = torch.randint(0, 3, (8, 9), generator=draw)
    return (start + torch.arange(9) * 3 + noise) % VOCABULARY


def newton_schulz(matrix: Tensor, times: int = 1) -> Tensor:
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(times):
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class TinyMuon(Optimizer):
    """Muon for groups with `use_muon`, AdamW for the others. `bug` names what is wrong."""

    def __init__(self, groups: list[dict[str, Any]], bug: str = "", **defaults: Any) -> None:
        self.bug = bug
        usual = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
        super().__init__(groups, {**usual, **defaults})

    def direction(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state, momentum, nesterov = self.state[p], group["momentum"], group["nesterov"]
        momentum, nesterov = 0.7 if self.bug == "momentum" else momentum, nesterov and self.bug != "nesterov"
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(g))
        buffer.mul_(momentum).add_(g)
        return g + momentum * buffer if nesterov else buffer

    def orthogonalized(self, x: Tensor) -> Tensor:
        if self.bug == "sgd":
            return x
        if self.bug == "shard":
            return torch.cat([newton_schulz(part) for part in x.chunk(dist.get_world_size())])
        return newton_schulz(x, 2 if self.bug == "twice" else 1)

    def gradient(self, p: Tensor) -> Tensor:
        return p.grad  # type: ignore[return-value]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or (self.bug == "still" and p.ndim == 2 and p.shape[0] != p.shape[1]):
                    continue
                g, lr, decay = self.gradient(p).to(p.dtype), group["lr"], group["weight_decay"]
                if not group["use_muon"]:
                    self.adam(p, g, group)
                    continue
                g = g + decay * p if self.bug == "coupled-decay" else g
                update = self.orthogonalized(self.direction(p, g, group))
                rows, cols = update.shape
                rows = rows // dist.get_world_size() if self.bug == "shard-scale" else rows
                rows, cols = (cols, rows) if self.bug == "fan" else (rows, cols)
                if self.bug not in ("coupled-decay", "decay"):
                    p.mul_(1 - lr * decay)
                p.add_(
                    update,
                    alpha=-lr
                    * (max(1, rows / cols) ** 0.5 if self.bug != "shard-scale" else 0.2 * max(rows, cols) ** 0.5),
                )

    def adam(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        state["step"] = state.get("step", torch.zeros(())) + 1
        mean = state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 1 - b1)
        square = state.setdefault("exp_avg_sq", torch.zeros_like(g)).lerp_(g * g, 1 - b2)
        age = float(state["step"])
        p.mul_(1 - 0.1 * group["lr"] * group["weight_decay"])
        p.addcdiv_(mean / (1 - b1**age), (square / (1 - b2**age)).sqrt() + group["eps"], value=-0.1 * group["lr"])


class FullMuon(TinyMuon):
    """Muon that gathers DTensors."""

    def gradient(self, p: Tensor) -> Tensor:
        return p.grad

    def orthogonalized(self, x: Tensor) -> Tensor:
        return distribute_tensor(newton_schulz(x.full_tensor()), x.device_mesh, x.placements)


class GatherMuon(TinyMuon):
    """Reduces gradients in the step, and each rank orthogonalizes some matrices."""

    def gradient(self, p: Tensor) -> Tensor:
        g = p.grad.clone()
        dist.all_reduce(g)
        return g / dist.get_world_size()

    def orthogonalized(self, x: Tensor) -> Tensor:
        self.turn = (getattr(self, "turn", -1) + 1) % dist.get_world_size()
        update = newton_schulz(x) if self.turn == dist.get_rank() else torch.empty_like(x)
        dist.broadcast(update, self.turn)
        return update


class OfOptimizers(Optimizer):
    """An optimizer whose step runs the steps of others."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def groups(model: nn.Module, embedding: bool = False) -> list[dict[str, Any]]:
    """Matrices of layers for Muon, and the rest for AdamW."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and ("layers" in n or (embedding and "embed" in n))]
    rest = [p for _, p in named if not any(p is q for q in matrices)]
    return [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]


@dataclass
class Run:
    """A trainer on this rank."""

    seed: int
    rank: int
    size: int
    folder: str
    bug: str = ""

    def train(self, model: nn.Module, *optimizers: Any, steps: int = STEPS, passes: int = 1, first: int = 0) -> None:
        for step in range(first, first + steps):
            for k in range(passes):
                (model(batch(self.seed, step, 10 * self.rank + k)) / passes).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def net(self) -> Net:
        return Net(self.seed)


def right_torch(run: Run) -> None:
    model = run.net()
    muon, rest = groups(model)
    run.train(model, torch.optim.Muon(muon["params"], lr=0.02), AdamW(rest["params"], lr=1e-3))


def plain(run: Run, **options: Any) -> None:
    model = run.net()
    run.train(model, TinyMuon(groups(model, embedding=run.bug == "embedding"), run.bug), **options)


def right_adamw(run: Run) -> None:
    model = run.net()
    run.train(model, AdamW(model.parameters(), lr=1e-2))


def right_scaler(run: Run) -> None:
    model, scaler = run.net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = TinyMuon(groups(model))
    for step in range(STEPS):
        scaler.scale(model(batch(run.seed, step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def right_engine(run: Run) -> None:
    model = run.net()
    muon, rest = groups(model)
    run.train(model, OfOptimizers(torch.optim.Muon(muon["params"], lr=0.02), AdamW(rest["params"], lr=1e-3)))


def right_bf16(run: Run) -> None:
    model = run.net().bfloat16()
    run.train(model, TinyMuon(groups(model)))


def right_schedules(run: Run) -> None:
    model = run.net()
    optimizer = TinyMuon(groups(model))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group.update(lr=0.02 * step / STEPS, momentum=0.8 + 0.02 * step, weight_decay=0.1 + 0.02 * step)
        run.train(model, optimizer, steps=1, first=step)


def right_compile(run: Run) -> None:
    model = run.net()
    run.train(torch.compile(model, backend="aot_eager"), TinyMuon(groups(model)))


def right_closure(run: Run) -> None:
    """The backward pass is inside of the step, as in Lightning."""
    model = run.net()
    optimizer = TinyMuon(groups(model), run.bug)

    def closure(step: int) -> None:
        optimizer.zero_grad()
        model(batch(run.seed, step)).backward()

    for step in range(STEPS):
        optimizer.step(lambda step=step: closure(step))


def step_by_group(run: Run) -> None:
    """One step of the optimizer for each group, as in DeepSpeed's ZeRO stages 1 and 2."""
    model = run.net()
    optimizer = TinyMuon(groups(model), run.bug)
    everything = optimizer.param_groups
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(run.seed, step)).backward()
        for group in everything:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = everything


def right_ddp(run: Run) -> None:
    model = DistributedDataParallel(run.net())
    run.train(model, TinyMuon(groups(model)), passes=2)


def right_gather(run: Run) -> None:
    model = run.net()
    run.train(model, GatherMuon(groups(model)))


def sharded(run: Run, mesh: Any = None) -> Net:
    model = run.net()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model


def hybrid(run: Run, mesh: Any = None, algorithm: str = "muon", **options: Any) -> None:
    model = sharded(run, mesh)
    optimizer = Hybrid(model, lr=0.01, weight_decay=0.1, muon={"algorithm": algorithm, **options})
    if options.get("overlap") == "forward":
        apply_in_forward(model, optimizer.parts.optimizers["muon"])
    run.train(model, optimizer)


def right_hsdp(run: Run) -> None:
    hybrid(run, init_device_mesh("cpu", (2, run.size // 2), mesh_dim_names=("replicate", "shard")))


def right_fsdp2_own(run: Run) -> None:
    model = sharded(run)
    run.train(model, FullMuon(groups(model)))


def right_owned(run: Run) -> None:
    model = run.net()
    fully_shard(model, ignored_params=own(model, mesh=init_device_mesh("cpu", (run.size,))))
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    run.train(model, Hybrid(model, lr=0.01, weight_decay=0.1))


def right_heads(run: Run) -> None:
    hybrid(run, split=[Split(match="layers.*.q.weight", dims="(h f) d -> h | f d", lengths={"h": 4})])


def right_experts(run: Run) -> None:
    model = nn.Module.__new__(Net)
    Net.__init__(model, run.seed)
    model.layers.append(Stack(SHAPES[run.seed % 3][0]))
    for module in (*model.layers, model):
        fully_shard(module)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    run.train(model, Hybrid(model, lr=0.01, weight_decay=0.1))


def right_forward(run: Run) -> None:
    hybrid(run, overlap="forward")


class Flat:
    """A trainer whose optimizer has flat copies in float32, and writes matrices back after its step."""

    def __init__(self, model: nn.Module, bug: str = "") -> None:
        self.model, self.groups, self.bug = model, groups(model), bug
        self.flat = [nn.Parameter(torch.cat([p.detach().flatten() for p in g["params"]])) for g in self.groups]
        self.inner = TinyFlat(self.flat, [[p.shape for p in g["params"]] for g in self.groups], bug)

    def step(self) -> None:
        for flat, group in zip(self.flat, self.groups, strict=True):
            flat.grad = torch.cat([p.grad.flatten() for p in group["params"]])
        self.inner.step()
        with torch.no_grad():
            for flat, group in zip(self.flat, self.groups, strict=True):
                for p, part in zip(group["params"], flat.split([p.numel() for p in group["params"]]), strict=True):
                    p.copy_(part.view(p.shape))

    def zero_grad(self) -> None:
        self.model.zero_grad()


class TinyFlat(Optimizer):
    """Muon on the matrices inside of the first flat parameter, SGD on the second."""

    def __init__(self, flat: list[nn.Parameter], shapes: list[list[torch.Size]], bug: str) -> None:
        self.shapes, self.bug = shapes, bug
        super().__init__(flat, {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_steps": 5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (matrices, rest), group = self.param_groups[0]["params"], self.param_groups[0]
        buffer = self.state[matrices].setdefault("momentum_buffer", torch.zeros_like(matrices))
        buffer.mul_(0.95).add_(matrices.grad)
        parts = (matrices.grad + 0.95 * buffer).split([s.numel() for s in self.shapes[0]])
        make = (lambda x: x) if self.bug == "sgd" else newton_schulz
        update = torch.cat([make(x.view(s)).flatten() for x, s in zip(parts, self.shapes[0], strict=True)])
        matrices.add_(update, alpha=-group["lr"])
        rest.add_(rest.grad, alpha=-group["lr"])


def flat_buffers(run: Run) -> None:
    model = run.net()
    run.train(model, Flat(model, run.bug))


def each_pass(run: Run) -> None:
    """Gradients become updates in hooks, once for each backward pass; the step is then SGD."""
    model = run.net()
    muon, rest = groups(model)
    buffers: dict[Tensor, Tensor] = {}

    def hook(p: Tensor, g: Tensor) -> Tensor:
        buffer = buffers.setdefault(p, torch.zeros_like(g))
        buffer.mul_(0.95).add_(g)
        return newton_schulz(g + 0.95 * buffer)

    def after(p: Tensor) -> None:
        total = totals.setdefault(p, torch.zeros_like(p))
        total.add_(hook(p, p.grad - seen.get(p, 0)))
        seen[p] = p.grad.clone()

    totals: dict[Tensor, Tensor] = {}
    seen: dict[Tensor, Tensor] = {}
    for p in muon["params"]:
        p.register_post_accumulate_grad_hook(after)

    class MuonOfTotals(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(totals.pop(p), alpha=-group["lr"])
            seen.clear()

    stated = {"lr": 0.005, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_steps": 5}
    run.train(model, MuonOfTotals(muon["params"], stated), AdamW(rest["params"]), passes=4)


def micro_momentum(run: Run) -> None:
    """Momentum advances in the hook of each backward pass."""
    model = run.net()
    muon, rest = groups(model)
    buffers: dict[Tensor, Tensor] = {}
    for p in muon["params"]:
        p.register_hook(lambda g, p=p: buffers.setdefault(p, torch.zeros_like(g)).mul_(0.8).add_(g) * 0 + g)

    class MuonOfBuffers(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(newton_schulz(buffers[p]), alpha=-group["lr"])

    stated = {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "ns_steps": 5}
    run.train(model, MuonOfBuffers(muon["params"], stated), AdamW(rest["params"]), passes=4)


def empty_shapes(run: Run) -> None:
    """A rule that asks partitioned parameters, of no elements, for their shape."""
    model = run.net()
    placeholders = {name: torch.empty(0) for name, _ in model.named_parameters()}
    rest = [p for name, p in model.named_parameters() if placeholders[name].ndim < 2]
    run.train(model, TinyMuon([{"params": rest, "use_muon": False}]))


def flat_parameters(run: Run) -> None:
    """Every parameter is flattened before Muon looks for matrices."""
    model = run.net()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    flat = nn.ParameterDict(
        {n.replace(".", "_"): nn.Parameter(p.detach().flatten()) for n, p in model.named_parameters()}
    )
    rest = [p for p in flat.values() if p.ndim < 2]
    optimizer = TinyMuon([{"params": rest, "use_muon": False}])
    model.requires_grad_(False)
    for step in range(STEPS):
        weights = {n: flat[n.replace(".", "_")].view(shape) for n, shape in shapes.items()}
        torch.func.functional_call(model, weights, (batch(run.seed, step, run.rank),)).backward()
        for p in rest:
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def nobody(run: Run) -> None:
    model = run.net()
    muon, rest = groups(model)
    run.train(model, TinyMuon([{"params": muon["params"][1:], "use_muon": True}, rest]))


def drift(run: Run) -> None:
    """Gradients of one matrix are not reduced."""
    model = run.net()
    optimizer = TinyMuon(groups(model))
    for step in range(STEPS):
        model(batch(run.seed, step, run.rank)).backward()
        for name, p in model.named_parameters():
            if name != "layers.1.up.weight":
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def reduced(run: Run) -> None:
    """Plain replicas with reduced gradients."""
    model = DistributedDataParallel(run.net())
    run.train(model, TinyMuon(groups(model), run.bug))


def resume(run: Run) -> Iterator[None]:
    """Trains and saves, and then a second time from the checkpoint."""
    path = f"{run.folder}/state.pt"
    wrap = DistributedDataParallel if run.size > 1 else nn.Identity
    model = run.net()
    optimizer = TinyMuon(groups(model))
    run.train(wrap(model) if run.size > 1 else model, optimizer)
    if run.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if run.size > 1:
        dist.barrier()
    yield
    model = Net(run.seed + 30)
    optimizer = TinyMuon(groups(model))
    state = torch.load(path)
    initial = {n: p.detach().clone() for n, p in model.named_parameters()}
    if run.bug != "model":
        model.load_state_dict(state["model"])
    if run.bug == "momentum":
        for entry in state["optimizer"]["state"].values():
            if "momentum_buffer" in entry:
                entry["momentum_buffer"] = torch.randn_like(entry["momentum_buffer"]) * 0.01
    optimizer.load_state_dict(state["optimizer"])
    if run.bug == "sync":  # A later call writes the weights of construction.
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(initial[n])
    run.train(wrap(model) if run.size > 1 else model, optimizer, first=STEPS)


def resume_dcp(run: Run) -> Iterator[None]:
    model = sharded(run)
    optimizer = Hybrid(model, lr=0.01)
    run.train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{run.folder}/dcp")
    yield
    other = Run(run.seed, run.rank, run.size, run.folder)
    model = sharded(other)
    optimizer = Hybrid(model, lr=0.01)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{run.folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    run.train(model, optimizer, first=STEPS)


@dataclass(frozen=True)
class Kind:
    """A trainer: ranks, expected code (empty if it is right), and the public bug in miniature."""

    name: str
    ranks: int
    code: str
    train: Callable[[Run], Any]
    bug: str = ""
    source: str = ""


KINDS = (
    Kind("torch.optim.Muon", 1, "", right_torch),
    Kind("own Muon", 1, "", plain),
    Kind("AdamW", 1, "", right_adamw),
    Kind("accumulation", 1, "", lambda run: plain(run, passes=4)),
    Kind("GradScaler and clipping", 1, "", right_scaler),
    Kind("optimizer of optimizers", 1, "", right_engine),
    Kind("bfloat16 weights", 1, "", right_bf16),
    Kind("schedules", 1, "", right_schedules),
    Kind("compiled", 1, "", right_compile),
    Kind("DDP", 2, "", right_ddp),
    Kind("gradients reduced in the step", 2, "", right_gather),
    Kind("FSDP2, Hybrid", 2, "", hybrid),
    Kind("FSDP2, Hybrid, 4 ranks", 4, "", hybrid),
    Kind("FSDP2, gathering Muon", 2, "", right_fsdp2_own),
    Kind("owned matrices", 2, "", right_owned),
    Kind("heads", 2, "", right_heads),
    Kind("NorMuon", 2, "", lambda run: hybrid(run, algorithm="normuon")),
    Kind("experts", 2, "", right_experts),
    Kind("HSDP", 4, "", right_hsdp),
    Kind("resume", 1, "", resume),
    Kind("resume, 2 ranks", 2, "", resume),
    Kind("resume, DCP", 2, "", resume_dcp),
    Kind("updates in the next forward", 2, "", right_forward),
    Kind("flat buffers", 1, "", flat_buffers),
    Kind("no Newton-Schulz", 1, "sgd", plain, "sgd", "deepspeed#8441"),
    Kind("Newton-Schulz in each pass", 1, "per-micro-batch", each_pass, "", "deepspeed#8443"),
    Kind("rule on empty shapes", 1, "inactive", empty_shapes, "", "deepspeed#8438"),
    Kind("rule on flat parameters", 2, "inactive", flat_parameters, "", "verl-SpeCo#91"),
    Kind("weights overwritten after a load", 2, "resume", resume, "sync", "Megatron-LM#6920"),
    Kind("weights not loaded", 1, "resume", resume, "model"),
    Kind("other momentum loaded", 1, "resume", resume, "momentum"),
    Kind("momentum in each pass", 1, "micro-momentum", micro_momentum),
    Kind("shards orthogonalized, 2 ranks", 2, "per-shard", reduced, "shard"),
    Kind("shards orthogonalized, 4 ranks", 4, "per-shard", reduced, "shard"),
    Kind("size of a shard", 2, "scale", reduced, "shard-scale"),
    Kind("rows and columns exchanged", 1, "scale", plain, "fan"),
    Kind("no nesterov", 1, "nesterov", plain, "nesterov"),
    Kind("other momentum", 1, "momentum", plain, "momentum"),
    Kind("decay in the gradient", 1, "coupled-decay", plain, "coupled-decay"),
    Kind("no decay", 1, "decay", plain, "decay"),
    Kind("orthogonalized twice", 1, "twice", plain, "twice"),
    Kind("embedding orthogonalized", 1, "embedding", plain, "embedding"),
    Kind("matrices not updated", 1, "still", plain, "still"),
    Kind("parameter without optimizer", 1, "nobody", nobody),
    Kind("replicas drift", 2, "replicas", drift),
    Kind("flat buffers, no Newton-Schulz", 1, "sgd", flat_buffers, "sgd"),
    Kind("backward in a closure", 1, "", right_closure),
    Kind("no Newton-Schulz, closure", 1, "sgd", right_closure, "sgd"),
    Kind("a step for each group", 1, "", step_by_group),
    Kind("no Newton-Schulz, a step for each group", 1, "sgd", step_by_group, "sgd"),
)


def audited(rank: int, size: int, number: int, seed: int, folder: str) -> tuple[list[str], str, dict[str, Any]]:
    """Codes, text and table of a kind on this rank."""
    kind = KINDS[number]
    gc.collect()
    torch.manual_seed(seed)
    run = Run(seed, rank, size, folder, kind.bug)
    Path(folder).mkdir(parents=True, exist_ok=True)
    report = list(_reports(run, kind))[-1]
    rows = [dict(row) for row in report.table]
    return report.codes, str(report), {"table": rows, "seconds": report.seconds, "undecided": report.undecided}


def _reports(run: Run, kind: Kind) -> Iterator[Report]:
    parts: Any = iter([None])
    started = False
    while True:
        with Audit(limit=30.0) as audit:
            if not started:
                result = kind.train(run)
                parts, started = result if hasattr(result, "__next__") else iter(()), True
            going = next(parts, "end") != "end"
        assert audit.report is not None
        yield audit.report
        if not going:
            return
