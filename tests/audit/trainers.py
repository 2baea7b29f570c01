"""Small trainers, right ones and wrong ones, for the audit: a table of kinds, ranks and expected codes."""

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
    def __init__(self, seed: int) -> None:
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


def newton_schulz(matrix: Tensor, times: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(times):
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class TinyMuon(Optimizer):
    """Muon for groups with `use_muon`, AdamW for the others. `bug` names what is wrong, or unusual."""

    def __init__(self, groups: list[dict[str, Any]], bug: str = "", **defaults: Any) -> None:
        self.bug = bug
        usual = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
        super().__init__(groups, {**usual, **defaults})

    def direction(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        momentum = {"momentum": 0.7, "reset": 0.0}.get(self.bug, group["momentum"])
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(g)).mul_(momentum).add_(g)
        return g + momentum * buffer if group["nesterov"] and self.bug != "nesterov" else buffer

    def orthogonalized(self, x: Tensor) -> Tensor:
        if self.bug == "sgd":
            return x
        if self.bug == "shard" or (self.bug == "fused" and x.shape[0] == x.shape[1]):
            return torch.cat([newton_schulz(part) for part in x.chunk(dist.get_world_size())])
        return newton_schulz(x, 2 if self.bug == "twice" else 1)

    def gradient(self, p: Tensor) -> Tensor:
        return p.grad.to(p.dtype)  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not (self.bug == "still" and p.ndim == 2 and p.shape[0] != p.shape[1]):
                    (self.muon if group["use_muon"] else self.adam)(p, self.gradient(p), group)

    def muon(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        update = self.orthogonalized(self.direction(p, g + decay * p if self.bug == "coupled-decay" else g, group))
        rows, cols = update.shape
        sizes = {"fan": max(1, cols / rows) ** 0.5, "sign": -1.0}
        if self.bug == "shard-scale":
            sizes["shard-scale"] = 0.2 * max(rows // dist.get_world_size(), cols) ** 0.5
        factors = {"coupled-decay": 0, "decay": 0, "decay-twice": 2, "cautious": update * p > 0}
        new = p.float() * (1 - lr * decay * factors.get(self.bug, 1))
        new = new - lr * sizes.get(self.bug, max(1, rows / cols) ** 0.5) * update
        if self.bug == "rounded":  # Stochastic rounding to bfloat16.
            new = (new.view(torch.int32) + torch.randint(0, 1 << 16, new.shape, dtype=torch.int32) & -65536).view(
                new.dtype
            )
        p.copy_(new)

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


class Applied(Optimizer):
    """Subtracts the update that a function gives for a parameter, and states options of Muon."""

    def __init__(self, params: list[Tensor], update: Callable[[Tensor], Tensor], **stated: Any) -> None:
        self.update = update
        usual = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_steps": 5}
        super().__init__(params, {**usual, **stated})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p), alpha=group["lr"])


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

    def train(
        self, model: nn.Module, *optimizers: Any, steps: int = STEPS, passes: int = 1, first: int = 0,
        before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Train, and call `before` and `after` each step with the model and the number of the step."""
        for step in range(first, first + steps):
            for k in range(passes):
                if self.bug == "zeroed":
                    model.zero_grad()
                (model(batch(self.seed, step, 10 * self.rank + k)) / passes).backward()
            with torch.no_grad():
                _ = before and before(model, step)
            for optimizer in optimizers:
                optimizer.step()
                if self.bug != "kept":
                    optimizer.zero_grad()
            with torch.no_grad():
                _ = after and after(model, step)

    def net(self) -> Net:
        return Net(self.seed)


def plain(run: Run, wrap: Callable[[Net], nn.Module] = lambda net: net, make: Any = TinyMuon, **options: Any) -> None:
    net = run.net()
    model = wrap(net)
    run.train(model, make(groups(net, embedding=run.bug == "embedding"), run.bug), **options)


ddp = partial(plain, wrap=DistributedDataParallel)


def torch_muon(run: Run, join: Callable[..., Any] = lambda *parts: parts) -> None:
    model = run.net()
    muon, rest = groups(model)
    run.train(model, *join(torch.optim.Muon(muon["params"], lr=0.02), AdamW(rest["params"], lr=1e-3)))


def adamw(run: Run) -> None:
    model = run.net()
    run.train(model, AdamW(model.parameters(), lr=1e-2))


def adamw_first(run: Run) -> None:
    """AdamW has states before Muon's first step."""
    model = run.net()
    muon, rest = groups(model)
    run.train(model, AdamW(rest["params"], lr=1e-3), TinyMuon([muon], run.bug))


def one_for_each(run: Run) -> None:
    model = run.net()
    muon, rest = groups(model)
    optimizers = [torch.optim.Muon([p], lr=0.02) for p in muon["params"]]
    run.train(model, *optimizers, *(AdamW([p], lr=1e-3) for p in rest["params"]))


def by_turns(run: Run) -> None:
    """Each optimizer has backward passes of its own."""
    model = run.net()
    muon, rest = groups(model)
    optimizers = torch.optim.Muon(muon["params"], lr=0.02), AdamW(rest["params"], lr=1e-3)
    for step in range(2 * STEPS):
        run.train(model, optimizers[step % 2], steps=1, first=step, after=lambda model, _: model.zero_grad())


def scaler(run: Run, scale: float = 1024.0) -> None:
    """A large scale makes the first and third gradients infinite, so that their steps are skipped."""
    model, scaler = run.net(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = TinyMuon(groups(model))
    for step in range(STEPS):
        loss = model(batch(run.seed, step)) * (1e10 if scale > 1e30 and step in (0, 2) else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def schedules(run: Run) -> None:
    model = run.net()
    optimizer = TinyMuon(groups(model))

    def set_options(model: nn.Module, step: int) -> None:
        for group in optimizer.param_groups:
            group.update(lr=0.02 * step / STEPS, momentum=0.8 + 0.02 * step, weight_decay=0.1 + 0.02 * step)

    run.train(model, optimizer, before=set_options)


def closure(run: Run) -> None:
    """The backward pass is inside of the step, as in Lightning."""
    model = run.net()
    optimizer = TinyMuon(groups(model), run.bug)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        model(batch(run.seed, step)).backward()

    for step in range(STEPS):
        optimizer.step(partial(backward, step))


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


def still_parts(run: Run) -> None:
    """Frozen layers, and a matrix with a rate of 0."""
    model = run.net()
    model.layers[0].requires_grad_(False)
    muon, rest = groups(model)
    last = {"params": muon["params"][-1:], "use_muon": True, "lr": 0.0}
    run.train(model, TinyMuon([{**muon, "params": muon["params"][:-1]}, rest, last]))


def tied(net: Net) -> Net:
    net.lm_head.weight = net.embed.weight
    return net


def averaged(run: Run) -> None:
    """Weights are averages of the steps, as in Lookahead."""
    slow = [p.detach().clone() for p in run.net().parameters()]

    def average(model: nn.Module, step: int) -> None:
        for mean, p in zip(slow, model.parameters(), strict=True):
            p.copy_(mean.lerp_(p, 0.5))

    plain(run, after=average)


def unit_rows(model: nn.Module, step: int) -> None:
    for p in model.layers.parameters():
        if p.ndim == 2:
            p.div_(p.norm(dim=1, keepdim=True))


def clip_values(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def reduce_all_but(model: nn.Module, step: int, skipped: tuple[str, ...] = ()) -> None:
    for name, p in model.named_parameters():
        if not name.endswith(skipped):
            dist.all_reduce(p.grad)


def sharded(run: Run, mesh: Any = None, model: Net | None = None) -> Net:
    model = model or run.net()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model


def hybrid(run: Run, shape: tuple[int, ...] = (), algorithm: str = "muon", **options: Any) -> None:
    model = sharded(run, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None)
    optimizer = Hybrid(model, lr=0.01, weight_decay=0.1, muon={"algorithm": algorithm, **options})
    if options.get("overlap") == "forward":
        apply_in_forward(model, optimizer.parts.optimizers["muon"])
    run.train(model, optimizer)


def gathering(run: Run) -> None:
    model = sharded(run)
    run.train(model, FullMuon(groups(model)))


def owned(run: Run) -> None:
    model = run.net()
    fully_shard(model, ignored_params=own(model, mesh=init_device_mesh("cpu", (run.size,))))
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    run.train(model, Hybrid(model, lr=0.01, weight_decay=0.1))


def experts(run: Run) -> None:
    model = run.net()
    model.layers.append(Stack(SHAPES[run.seed % 3][0]))
    model = sharded(run, model=model)
    run.train(model, Hybrid(model, lr=0.01, weight_decay=0.1))


class Flat:
    """A trainer whose optimizer has flat copies in float32, and writes matrices back after its step."""

    def __init__(self, model: nn.Module, bug: str = "") -> None:
        self.model, self.groups = model, groups(model)
        self.flat = [nn.Parameter(torch.cat([p.detach().flatten() for p in g["params"]])) for g in self.groups]
        self.inner = TinyFlat(self.flat, [p.shape for p in self.groups[0]["params"]], bug)

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


class TinyFlat(Applied):
    """Muon on the matrices inside of the first flat parameter, SGD on the second."""

    def __init__(self, flat: list[nn.Parameter], shapes: list[torch.Size], bug: str) -> None:
        self.shapes, self.bug = shapes, bug
        super().__init__(flat, self.direction)

    def direction(self, p: Tensor) -> Tensor:
        if p is not self.param_groups[0]["params"][0]:
            return p.grad
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
        parts = (p.grad + 0.95 * buffer).split([shape.numel() for shape in self.shapes])
        make = (lambda x: x) if self.bug == "sgd" else newton_schulz
        return torch.cat([make(x.view(s)).flatten() for x, s in zip(parts, self.shapes, strict=True)])


def flat_buffers(run: Run) -> None:
    model = run.net()
    run.train(model, Flat(model, run.bug))


def each_pass(run: Run) -> None:
    """Gradients become updates in hooks, once for each backward pass; the step adds them."""
    model = run.net()
    muon, rest = groups(model)
    buffers, totals, seen = dict[Tensor, Tensor](), dict[Tensor, Tensor](), dict[Tensor, Tensor]()

    def accumulate(p: Tensor) -> None:
        g = p.grad - seen.get(p, 0)
        buffer = buffers.setdefault(p, torch.zeros_like(g)).mul_(0.95).add_(g)
        totals[p] = totals.get(p, 0) + newton_schulz(g + 0.95 * buffer)
        seen[p] = p.grad.clone()

    for p in muon["params"]:
        p.register_post_accumulate_grad_hook(accumulate)
    optimizer = Applied(muon["params"], totals.pop, lr=0.005)
    run.train(model, optimizer, AdamW(rest["params"]), passes=4, after=lambda *_: seen.clear())


def micro_momentum(run: Run) -> None:
    """Momentum advances in the hook of each backward pass."""
    model = run.net()
    muon, rest = groups(model)
    buffers: dict[Tensor, Tensor] = {}
    for p in muon["params"]:
        p.register_hook(lambda g, p=p: buffers.setdefault(p, torch.zeros_like(g)).mul_(0.8).add_(g) * 0 + g)
    optimizer = Applied(muon["params"], lambda p: newton_schulz(buffers[p]), momentum=0.8, nesterov=False)
    run.train(model, optimizer, AdamW(rest["params"]), passes=4)


def in_hook(run: Run) -> None:
    """A hook puts the update in the place of the gradient."""
    model = run.net()
    muon, rest = groups(model)
    buffers: dict[Tensor, Tensor] = {}

    def orthogonalize(p: Tensor) -> None:
        buffer = buffers.setdefault(p, torch.zeros_like(p)).mul_(0.95).add_(p.grad)
        p.grad = newton_schulz(p.grad + 0.95 * buffer)

    for p in muon["params"]:
        p.register_post_accumulate_grad_hook(orthogonalize)
    run.train(model, Applied(muon["params"], lambda p: p.grad), AdamW(rest["params"]))


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
    flat = {n: nn.Parameter(p.detach().flatten()) for n, p in model.named_parameters()}
    module = nn.ParameterDict({n.replace(".", "_"): p for n, p in flat.items()})
    model.requires_grad_(False)
    optimizer = TinyMuon([{"params": [p for p in module.parameters() if p.ndim < 2], "use_muon": False}])
    for step in range(STEPS):
        weights = {n: p.view(shapes[n]) for n, p in flat.items()}
        torch.func.functional_call(model, weights, (batch(run.seed, step, run.rank),)).backward()
        reduce_all_but(module, step)
        optimizer.step()
        optimizer.zero_grad()


def nobody(run: Run) -> None:
    model = run.net()
    muon, rest = groups(model)
    run.train(model, TinyMuon([{"params": muon["params"][1:], "use_muon": True}, rest]))


def of_a_copy(run: Run) -> None:
    """The model is copied after its optimizer is made."""
    model = run.net()
    optimizer = TinyMuon(groups(model))
    run.train(copy.deepcopy(model), optimizer)


def unequal(run: Run, before: Any = None) -> None:
    """Each rank draws weights of its own."""
    model = Net(run.seed + 3 * run.rank)
    run.train(model, TinyMuon(groups(model)), before=before)


def parts(run: Run) -> None:
    """Some matrices are other ones on each rank, as in tensor parallelism of plain tensors."""
    model = run.net()
    for layer in model.layers:
        layer.up.weight.data.mul_(1 + run.rank)
    run.train(model, TinyMuon(groups(model)), before=partial(reduce_all_but, skipped=("up.weight",)))


def one_rank(run: Run) -> None:
    """Muon steps on the first rank only."""
    model = run.net()
    muon, rest = groups(model)
    parts = torch.optim.Muon(muon["params"], lr=0.02), AdamW(rest["params"], lr=1e-3)
    run.train(model, *parts[run.rank :], before=reduce_all_but)


def resume(run: Run) -> Iterator[None]:
    """Trains and saves, and then a second time from the checkpoint."""
    path = f"{run.folder}/state.pt"
    wrap = DistributedDataParallel if run.size > 1 else lambda model: model
    model = run.net()
    optimizer = TinyMuon(groups(model))
    run.train(wrap(model), optimizer)
    if run.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if run.size > 1:
        dist.barrier()
    yield
    model = Net(run.seed + 30)
    optimizer = TinyMuon(groups(model))
    state = torch.load(path)
    initial = copy.deepcopy(model.state_dict())
    if run.bug != "model":
        model.load_state_dict(state["model"])
    for entry in state["optimizer"]["state"].values() if run.bug == "momentum" else ():
        if "momentum_buffer" in entry:
            entry["momentum_buffer"] = torch.randn_like(entry["momentum_buffer"]) * 0.01
    if run.bug == "head":  # Fine-tuning with new states.
        nn.init.normal_(model.lm_head.weight)
    else:
        optimizer.load_state_dict(state["optimizer"])
    if run.bug == "sync":  # A later call writes the weights of construction.
        model.load_state_dict(initial)
    run.train(wrap(model), optimizer, first=STEPS)


def resume_dcp(run: Run) -> Iterator[None]:
    for first in (0, STEPS):
        model = sharded(run)
        optimizer = Hybrid(model, lr=0.01)
        if first:
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{run.folder}/dcp")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        run.train(model, optimizer, first=first)
        if not first:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{run.folder}/dcp")
            yield


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
    Kind("torch.optim.Muon", 1, "", torch_muon),
    Kind("own Muon", 1, "", plain),
    Kind("AdamW", 1, "", adamw),
    Kind("accumulation", 1, "", partial(plain, passes=4)),
    Kind("GradScaler and clipping", 1, "", scaler),
    Kind("optimizer of optimizers", 1, "", partial(torch_muon, join=lambda *parts: [OfOptimizers(*parts)])),
    Kind("bfloat16 weights", 1, "", partial(plain, wrap=Net.bfloat16)),
    Kind("schedules", 1, "", schedules),
    Kind("compiled", 1, "", partial(plain, wrap=partial(torch.compile, backend="aot_eager"))),
    Kind("DDP", 2, "", partial(ddp, passes=2)),
    Kind("gradients reduced in the step", 2, "", partial(plain, make=GatherMuon)),
    Kind("FSDP2, Hybrid", 2, "", hybrid),
    Kind("FSDP2, Hybrid, 4 ranks", 4, "", hybrid),
    Kind("FSDP2, gathering Muon", 2, "", gathering),
    Kind("owned matrices", 2, "", owned),
    Kind(
        "heads",
        2,
        "",
        partial(hybrid, split=[Split(match="layers.*.q.weight", dims="(h f) d -> h | f d", lengths={"h": 4})]),
    ),
    Kind("NorMuon", 2, "", partial(hybrid, algorithm="normuon")),
    Kind("experts", 2, "", experts),
    Kind("HSDP", 4, "", partial(hybrid, shape=(2, 2))),
    Kind("resume", 1, "", resume),
    Kind("resume, 2 ranks", 2, "", resume),
    Kind("resume, DCP", 2, "", resume_dcp),
    Kind("updates in the next forward", 2, "", partial(hybrid, overlap="forward")),
    Kind("flat buffers", 1, "", flat_buffers),
    Kind("no Newton-Schulz", 1, "sgd", plain, "sgd", "deepspeed#8441"),
    Kind("Newton-Schulz in each pass", 1, "per-micro-batch", each_pass, "", "deepspeed#8443"),
    Kind("rule on empty shapes", 1, "inactive", empty_shapes, "", "deepspeed#8438"),
    Kind("rule on flat parameters", 2, "inactive", flat_parameters, "", "verl-SpeCo#91"),
    Kind("weights overwritten after a load", 2, "resume", resume, "sync", "Megatron-LM#6920"),
    Kind("weights not loaded", 1, "resume", resume, "model"),
    Kind("other momentum loaded", 1, "resume", resume, "momentum"),
    Kind("momentum in each pass", 1, "micro-momentum", micro_momentum),
    Kind("shards orthogonalized, 2 ranks", 2, "per-shard", ddp, "shard"),
    Kind("shards orthogonalized, 4 ranks", 4, "per-shard", ddp, "shard"),
    Kind("size of a shard", 2, "scale", ddp, "shard-scale"),
    Kind("rows and columns exchanged", 1, "scale", plain, "fan"),
    Kind("no nesterov", 1, "nesterov", plain, "nesterov"),
    Kind("other momentum", 1, "momentum", plain, "momentum"),
    Kind("decay in the gradient", 1, "coupled-decay", plain, "coupled-decay"),
    Kind("no decay", 1, "decay", plain, "decay"),
    Kind("orthogonalized twice", 1, "twice", plain, "twice"),
    Kind("embedding orthogonalized", 1, "embedding", plain, "embedding"),
    Kind("matrices not updated", 1, "still", plain, "still"),
    Kind("parameter without optimizer", 1, "nobody", nobody),
    Kind("replicas drift", 2, "replicas", partial(plain, before=partial(reduce_all_but, skipped=("1.up.weight",)))),
    Kind("flat buffers, no Newton-Schulz", 1, "sgd", flat_buffers, "sgd"),
    Kind("backward in a closure", 1, "", closure),
    Kind("no Newton-Schulz, closure", 1, "sgd", closure, "sgd"),
    Kind("a step for each group", 1, "", step_by_group),
    Kind("no Newton-Schulz, a step for each group", 1, "sgd", step_by_group, "sgd"),
    Kind("clipping of values", 1, "", partial(plain, before=clip_values)),
    Kind("averaged weights", 1, "", averaged),
    Kind("rows of unit length", 1, "", partial(plain, after=unit_rows)),
    Kind("cautious decay", 1, "", plain, "cautious"),
    Kind("stochastic rounding", 1, "", partial(plain, wrap=Net.bfloat16), "rounded"),
    Kind("an optimizer for each parameter", 1, "", one_for_each),
    Kind("optimizers by turns", 1, "", by_turns),
    Kind("frozen layers and a rate of 0", 1, "", still_parts),
    Kind("tied embedding and head", 1, "", partial(plain, wrap=tied)),
    Kind("two matrices in one", 2, "", ddp, "fused"),
    Kind("a model on each rank", 2, "", unequal),
    Kind("parts of matrices on each rank", 2, "", parts),
    Kind("Newton-Schulz in a hook", 1, "", in_hook),
    Kind("a new head after a load", 1, "", resume, "head"),
    Kind("unequal replicas", 2, "replicas", partial(unequal, before=reduce_all_but)),
    Kind("Muon on one rank", 2, "replicas", one_rank),
    Kind("decay twice", 1, "decay", plain, "decay-twice"),
    Kind("momentum forgotten", 1, "momentum", plain, "reset"),
    Kind("optimizer of a copy", 1, "nobody", of_a_copy),
    Kind("zero_grad in each pass", 1, "zero_grad", partial(plain, passes=4), "zeroed"),
    Kind("no zero_grad", 1, "zero_grad", plain, "kept"),
    Kind("zero_grad in each pass, DDP", 2, "zero_grad", partial(ddp, passes=2), "zeroed"),
    Kind("no zero_grad, DDP", 2, "zero_grad", ddp, "kept"),
    Kind("flipped sign", 1, "sign", plain, "sign"),
    Kind("steps that GradScaler skips", 1, "", partial(scaler, scale=3e38)),
    Kind("other momentum after AdamW", 1, "momentum", adamw_first, "momentum"),
)


def audited(rank: int, size: int, number: int, seed: int, folder: str) -> tuple[list[str], str, dict[str, Any]]:
    """Codes, text and table of a kind on this rank, in its last audited part."""
    gc.collect()
    torch.manual_seed(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    report = list(reports(Run(seed, rank, size, folder, KINDS[number].bug), KINDS[number]))[-1]
    return report.codes, str(report), {"table": report.table, "seconds": report.seconds, "undecided": report.undecided}


def reports(run: Run, kind: Kind) -> Iterator[Report]:
    """Reports of the parts of a trainer, which end where it yields."""
    parts: Any = None
    going = True
    while going:
        with Audit(limit=30.0) as audit:
            parts = parts or kind.train(run) or iter(())
            going = next(parts, "end") != "end"
        assert audit.report is not None
        yield audit.report
