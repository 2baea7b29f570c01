"""Small trainers, right ones and wrong ones, for the audit: a table of kinds, ranks and expected codes."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
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
from titan_muon.audit import Audit
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


def newton_schulz(matrix: Tensor) -> Tensor:
    """In bfloat16 and with a rounding of each operation, as most scripts have it."""
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


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
        shards = dist.get_world_size() if self.bug == "shard" or (self.bug == "fused" and len(x) == x.shape[1]) else 1
        update = torch.cat([newton_schulz(part) for part in x.chunk(shards)])
        return newton_schulz(update) if self.bug == "twice" else update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not (self.bug == "still" and p.ndim == 2 and p.shape[0] != p.shape[1]):
                    (self.muon if group["use_muon"] else self.adam)(p, p.grad.to(p.dtype), group)

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
            noise = torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
            new = (new.view(torch.int32) + noise & -65536).view(torch.float32)
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
        return distribute_tensor(super().orthogonalized(x.full_tensor()), x.device_mesh, x.placements)


class GatherMuon(TinyMuon):
    """Reduces gradients in the step, and each rank orthogonalizes some matrices."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad.div_(dist.get_world_size()))
        super().step()

    def orthogonalized(self, x: Tensor) -> Tensor:
        self.turn = (getattr(self, "turn", -1) + 1) % dist.get_world_size()
        update = super().orthogonalized(x) if self.turn == dist.get_rank() else torch.empty_like(x)
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


@dataclass
class Run:
    """A trainer on this rank, whose model has matrices in its layers for Muon, and the rest for AdamW."""

    seed: int
    rank: int
    size: int
    folder: str
    bug: str = ""

    def __post_init__(self) -> None:
        self.model = Net(self.seed)

    @property
    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters for Muon and for AdamW."""
        named = dict(self.model.named_parameters())
        wanted = ("layers", "embed") if self.bug == "embedding" else ("layers",)
        matrices = [name for name, p in named.items() if p.ndim == 2 and name.startswith(wanted)]
        return [named[name] for name in matrices], [p for name, p in named.items() if name not in matrices]

    def train(
        self, *optimizers: Any, model: nn.Module | None = None, steps: int = STEPS, passes: int = 1, first: int = 0,
        before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Train, and call `before` and `after` each step with the model and the number of the step."""
        model = self.model if model is None else model
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


# Optimizers of a run.


def groups(muon: Iterable[Tensor], rest: Iterable[Tensor]) -> list[dict[str, Any]]:
    return [{"params": [*muon], "use_muon": True}, {"params": [*rest], "use_muon": False}]


def tiny(run: Run, made: type[TinyMuon] = TinyMuon) -> list[Any]:
    return [made(groups(*run.parts), run.bug)]


def torch_muon(run: Run) -> list[Any]:
    muon, rest = run.parts
    return [torch.optim.Muon(muon, lr=0.02), AdamW(rest, lr=1e-3)]


def one_for_each(run: Run) -> list[Any]:
    muon, rest = run.parts
    return [*(torch.optim.Muon([p], lr=0.02) for p in muon), *(AdamW([p], lr=1e-3) for p in rest)]


def adamw_first(run: Run) -> list[Any]:
    """AdamW has states before Muon's first step."""
    muon, rest = run.parts
    return [AdamW(rest, lr=1e-3), TinyMuon(groups(muon, []), run.bug)]


def still_parts(run: Run) -> list[Any]:
    """Frozen layers, and a matrix with a rate of 0."""
    run.model.layers[0].requires_grad_(False)
    (*muon, last), rest = run.parts
    return [TinyMuon([*groups(muon, rest), {"params": [last], "use_muon": True, "lr": 0.0}])]


def all_but_one(run: Run) -> list[Any]:
    muon, rest = run.parts
    return [TinyMuon(groups(muon[1:], rest))]


def empty_shapes(run: Run) -> list[Any]:
    """A rule that asks partitioned parameters, of no elements, for their shape."""
    return [TinyMuon(groups([], [p for p in run.model.parameters() if p.new_empty(0).ndim < 2]))]


def hybrid(run: Run, algorithm: str = "muon", **options: Any) -> list[Any]:
    optimizer = Hybrid(run.model, lr=0.01, weight_decay=0.1, muon={"algorithm": algorithm, **options})
    if options.get("overlap") == "forward":
        apply_in_forward(run.model, optimizer.parts.optimizers["muon"])
    return [optimizer]


class ByGroup:
    """One step of the optimizer for each group, as in DeepSpeed's ZeRO stages 1 and 2."""

    def __init__(self, run: Run) -> None:
        (self.inner,) = tiny(run)
        self.zero_grad = self.inner.zero_grad

    def step(self) -> None:
        everything = self.inner.param_groups
        for group in everything:
            self.inner.param_groups = [group]
            self.inner.step()
        self.inner.param_groups = everything


class Flat:
    """Flat copies in float32, Muon for matrices and SGD for the rest, written back to the matrices after the step."""

    def __init__(self, run: Run) -> None:
        self.parts, self.bug, self.zero_grad = run.parts, run.bug, run.model.zero_grad
        self.sizes = [[p.numel() for p in part] for part in self.parts]
        self.flat = [nn.Parameter(torch.cat([p.detach().flatten() for p in part])) for part in self.parts]
        self.inner = Applied(self.flat, self.update)

    def update(self, flat: Tensor) -> Tensor:
        if flat is not self.flat[0]:
            return flat.grad  # type: ignore[return-value]
        buffer = self.inner.state[flat].setdefault("momentum_buffer", torch.zeros_like(flat)).mul_(0.95).add_(flat.grad)
        directions = (flat.grad + 0.95 * buffer).split(self.sizes[0])
        make = (lambda x: x) if self.bug == "sgd" else newton_schulz
        return torch.cat([make(x.view(p.shape)).flatten() for x, p in zip(directions, self.parts[0], strict=True)])

    @torch.no_grad()
    def step(self) -> None:
        for flat, part in zip(self.flat, self.parts, strict=True):
            flat.grad = torch.cat([p.grad.flatten() for p in part])
        self.inner.step()
        for flat, part, sizes in zip(self.flat, self.parts, self.sizes, strict=True):
            for p, piece in zip(part, flat.split(sizes), strict=True):
                p.copy_(piece.view(p.shape))


def in_passes(run: Run) -> list[Any]:
    """Hooks of each of 4 backward passes advance the momentum. The step subtracts the mean of their updates, or one."""
    (muon, rest), add_up = run.parts, run.bug != "momentum"
    momentum = 0.95 if add_up else 0.8
    buffers, totals = ({p: torch.zeros_like(p) for p in muon} for _ in range(2))

    def advance(p: Tensor, g: Tensor) -> None:
        totals[p] += newton_schulz(g + momentum * buffers[p].mul_(momentum).add_(g))

    def update(p: Tensor) -> Tensor:
        total, totals[p] = totals[p], torch.zeros_like(p)
        return total / 4 if add_up else newton_schulz(buffers[p])

    for p in muon:
        p.register_hook(partial(advance, p))
    return [Applied(muon, update, momentum=momentum, nesterov=add_up), AdamW(rest)]


def in_hook(run: Run) -> list[Any]:
    """A hook puts the update in the place of the gradient."""
    muon, rest = run.parts
    buffers = {p: torch.zeros_like(p) for p in muon}

    def orthogonalize(p: Tensor) -> None:
        p.grad = newton_schulz(p.grad + 0.95 * buffers[p].mul_(0.95).add_(p.grad))

    for p in muon:
        p.register_post_accumulate_grad_hook(orthogonalize)
    return [Applied(muon, lambda p: p.grad), AdamW(rest)]


# Models of a run.


def sharded(run: Run, *shape: int) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    for module in (*run.model.layers, run.model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return run.model


def owned(run: Run) -> nn.Module:
    fully_shard(run.model, ignored_params=own(run.model, mesh=init_device_mesh("cpu", (run.size,))))
    run.model.set_force_sum_reduction_for_comms(True)
    run.model.set_gradient_divide_factor(1.0)
    return run.model


def experts(run: Run) -> nn.Module:
    run.model.layers.append(Stack(SHAPES[run.seed % 3][0]))
    return sharded(run)


def tied(run: Run) -> nn.Module:
    run.model.lm_head.weight = run.model.embed.weight
    return run.model


def unequal(run: Run) -> nn.Module:
    """Each rank draws weights of its own."""
    run.model = Net(run.seed + 3 * run.rank)
    return run.model


def parts_of_matrices(run: Run) -> nn.Module:
    """Some matrices are other ones on each rank, as in tensor parallelism of plain tensors."""
    for layer in run.model.layers:
        layer.up.weight.data.mul_(1 + run.rank)
    return run.model


# Acts before and after a step.


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


# Trainers.


def plain(run: Run, wrap: Callable[[Run], nn.Module] = lambda run: run.model, make: Any = tiny, **options: Any) -> None:
    model = wrap(run)
    run.train(*make(run), model=model, **options)


four = partial(plain, passes=4)
bfloat16 = partial(plain, wrap=lambda run: run.model.bfloat16())
ddp = partial(plain, wrap=lambda run: DistributedDataParallel(run.model))
fsdp = partial(plain, wrap=sharded, make=hybrid)
flat_buffers = partial(plain, make=lambda run: [Flat(run)])
by_group = partial(plain, make=lambda run: [ByGroup(run)])


def by_turns(run: Run) -> None:
    """Each optimizer has backward passes of its own."""
    optimizers = torch_muon(run)
    for step in range(2 * STEPS):
        run.train(optimizers[step % 2], steps=1, first=step, after=lambda model, _: model.zero_grad())


def scaler(run: Run, scale: float = 1024.0) -> None:
    """A large scale makes the first and third gradients infinite, so that their steps are skipped."""
    scaler, (optimizer,) = torch.amp.GradScaler("cpu", init_scale=scale), tiny(run)
    for step in range(STEPS):
        loss = run.model(batch(run.seed, step)) * (1e10 if scale > 1e30 and step in (0, 2) else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def schedules(run: Run) -> None:
    (optimizer,) = tiny(run)

    def set_options(model: nn.Module, step: int) -> None:
        for group in optimizer.param_groups:
            group.update(lr=0.02 * step / STEPS, momentum=0.8 + 0.02 * step, weight_decay=0.1 + 0.02 * step)

    run.train(optimizer, before=set_options)


def closure(run: Run) -> None:
    """The backward pass is inside of the step, as in Lightning."""
    (optimizer,) = tiny(run)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        run.model(batch(run.seed, step)).backward()

    for step in range(STEPS):
        optimizer.step(partial(backward, step))


def averaged(run: Run) -> None:
    """Weights are averages of the steps, as in Lookahead."""
    slow = [p.detach().clone() for p in run.model.parameters()]

    def average(model: nn.Module, step: int) -> None:
        for mean, p in zip(slow, model.parameters(), strict=True):
            p.copy_(mean.lerp_(p, 0.5))

    plain(run, after=average)


def flat_parameters(run: Run) -> None:
    """Every parameter is flattened before Muon looks for matrices."""
    named = dict(run.model.named_parameters())
    flat = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(p.detach().flatten()) for n, p in named.items()})
    run.model.requires_grad_(False)
    optimizer = TinyMuon(groups([], [p for p in flat.parameters() if p.ndim < 2]))
    for step in range(STEPS):
        weights = {n: flat[n.replace(".", "_")].view(p.shape) for n, p in named.items()}
        torch.func.functional_call(run.model, weights, (batch(run.seed, step, run.rank),)).backward()
        reduce_all_but(flat, step)
        optimizer.step()
        optimizer.zero_grad()


def of_a_copy(run: Run) -> None:
    """The model is copied after its optimizer is made."""
    optimizers = tiny(run)
    run.train(*optimizers, model=copy.deepcopy(run.model))


def resume(run: Run) -> Iterator[None]:
    """Trains and saves, and then a second time from the checkpoint."""
    path, train = f"{run.folder}/state.pt", ddp if run.size > 1 else plain
    optimizer = TinyMuon(groups(*run.parts))
    train(run, make=lambda run: [optimizer])
    if run.rank == 0:
        torch.save({"model": run.model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if run.size > 1:
        dist.barrier()
    yield
    run.model = model = Net(run.seed + 30)
    optimizer = TinyMuon(groups(*run.parts))
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
    train(run, make=lambda run: [optimizer], first=STEPS)


def resume_dcp(run: Run) -> Iterator[None]:
    for first in (0, STEPS):
        run.model = Net(run.seed)
        model, optimizer = sharded(run), Hybrid(run.model, lr=0.01)
        if first:
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{run.folder}/dcp")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        run.train(optimizer, first=first)
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
    train: Callable[[Run], Any] = plain
    bug: str = ""
    source: str = ""


HEADS = [Split(match="layers.*.q.weight", dims="(h f) d -> h | f d", lengths={"h": 4})]
KINDS = (
    Kind("torch.optim.Muon", 1, "", partial(plain, make=torch_muon)),
    Kind("own Muon", 1, ""),
    Kind("AdamW", 1, "", partial(plain, make=lambda run: [AdamW(run.model.parameters(), lr=1e-2)])),
    Kind("accumulation", 1, "", four),
    Kind("GradScaler and clipping", 1, "", scaler),
    Kind("optimizer of optimizers", 1, "", partial(plain, make=lambda run: [OfOptimizers(*torch_muon(run))])),
    Kind("bfloat16 weights", 1, "", bfloat16),
    Kind("schedules", 1, "", schedules),
    Kind("compiled", 1, "", partial(plain, wrap=lambda run: torch.compile(run.model, backend="aot_eager"))),
    Kind("DDP", 2, "", partial(ddp, passes=2)),
    Kind("gradients reduced in the step", 2, "", partial(plain, make=partial(tiny, made=GatherMuon))),
    Kind("FSDP2, Hybrid", 2, "", fsdp),
    Kind("FSDP2, Hybrid, 4 ranks", 4, "", fsdp),
    Kind("FSDP2, gathering Muon", 2, "", partial(fsdp, make=partial(tiny, made=FullMuon))),
    Kind("owned matrices", 2, "", partial(fsdp, wrap=owned)),
    Kind("heads", 2, "", partial(fsdp, make=partial(hybrid, split=HEADS))),
    Kind("NorMuon", 2, "", partial(fsdp, make=partial(hybrid, algorithm="normuon"))),
    Kind("experts", 2, "", partial(fsdp, wrap=experts)),
    Kind("HSDP", 4, "", partial(fsdp, wrap=lambda run: sharded(run, 2, 2))),
    Kind("resume", 1, "", resume),
    Kind("resume, 2 ranks", 2, "", resume),
    Kind("resume, DCP", 2, "", resume_dcp),
    Kind("updates in the next forward", 2, "", partial(fsdp, make=partial(hybrid, overlap="forward"))),
    Kind("flat buffers", 1, "", flat_buffers),
    Kind("no Newton-Schulz", 1, "sgd", plain, "sgd", "deepspeed#8441"),
    Kind("Newton-Schulz in each pass", 1, "per-micro-batch", partial(four, make=in_passes), "", "deepspeed#8443"),
    Kind("rule on empty shapes", 1, "inactive", partial(plain, make=empty_shapes), "", "deepspeed#8438"),
    Kind("rule on flat parameters", 2, "inactive", flat_parameters, "", "verl-SpeCo#91"),
    Kind("weights overwritten after a load", 2, "resume", resume, "sync", "Megatron-LM#6920"),
    Kind("weights not loaded", 1, "resume", resume, "model"),
    Kind("other momentum loaded", 1, "resume", resume, "momentum"),
    Kind("momentum in each pass", 1, "micro-momentum", partial(four, make=in_passes), "momentum"),
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
    Kind("parameter without optimizer", 1, "nobody", partial(plain, make=all_but_one)),
    Kind("replicas drift", 2, "replicas", partial(plain, before=partial(reduce_all_but, skipped=("1.up.weight",)))),
    Kind("flat buffers, no Newton-Schulz", 1, "sgd", flat_buffers, "sgd"),
    Kind("backward in a closure", 1, "", closure),
    Kind("no Newton-Schulz, closure", 1, "sgd", closure, "sgd"),
    Kind("a step for each group", 1, "", by_group),
    Kind("no Newton-Schulz, a step for each group", 1, "sgd", by_group, "sgd"),
    Kind("clipping of values", 1, "", partial(plain, before=clip_values)),
    Kind("averaged weights", 1, "", averaged),
    Kind("rows of unit length", 1, "", partial(plain, after=unit_rows)),
    Kind("cautious decay", 1, "", plain, "cautious"),
    Kind("stochastic rounding", 1, "", bfloat16, "rounded"),
    Kind("an optimizer for each parameter", 1, "", partial(plain, make=one_for_each)),
    Kind("optimizers by turns", 1, "", by_turns),
    Kind("frozen layers and a rate of 0", 1, "", partial(plain, make=still_parts)),
    Kind("tied embedding and head", 1, "", partial(plain, wrap=tied)),
    Kind("two matrices in one", 2, "", ddp, "fused"),
    Kind("a model on each rank", 2, "", partial(plain, wrap=unequal)),
    Kind("parts of matrices on each rank", 2, "",
         partial(plain, wrap=parts_of_matrices, before=partial(reduce_all_but, skipped=("up.weight",)))),
    Kind("Newton-Schulz in a hook", 1, "", partial(plain, make=in_hook)),
    Kind("a new head after a load", 1, "", resume, "head"),
    Kind("unequal replicas", 2, "replicas", partial(plain, wrap=unequal, before=reduce_all_but)),
    Kind("Muon on one rank", 2, "replicas",
         partial(plain, make=lambda run: torch_muon(run)[run.rank :], before=reduce_all_but)),
    Kind("decay twice", 1, "decay", plain, "decay-twice"),
    Kind("momentum forgotten", 1, "momentum", plain, "reset"),
    Kind("optimizer of a copy", 1, "nobody", of_a_copy),
    Kind("zero_grad in each pass", 1, "zero_grad", four, "zeroed"),
    Kind("no zero_grad", 1, "zero_grad", plain, "kept"),
    Kind("zero_grad in each pass, DDP", 2, "zero_grad", partial(ddp, passes=2), "zeroed"),
    Kind("no zero_grad, DDP", 2, "zero_grad", ddp, "kept"),
    Kind("flipped sign", 1, "sign", plain, "sign"),
    Kind("steps that GradScaler skips", 1, "", partial(scaler, scale=3e38)),
    Kind("other momentum after AdamW", 1, "momentum", partial(plain, make=adamw_first), "momentum"),
)  # fmt: skip


def audited(rank: int, size: int, number: int, seed: int, folder: str) -> tuple[list[str], str, dict[str, Any]]:
    """Codes, text and table of a kind on this rank, in the last of its parts, which end where the trainer yields."""
    torch.manual_seed(seed)
    kind, parts, going = KINDS[number], None, True
    run = Run(seed, rank, size, folder, kind.bug)
    while going:
        with Audit(limit=30.0) as audit:
            parts = parts or kind.train(run) or iter(())
            going = next(parts, "end") != "end"
    report = audit.report
    undecided = [(finding.names, finding.evidence) for finding in report.findings if finding.code == "undecided"]
    return report.codes, str(report), {"table": report.table, "seconds": report.seconds, "undecided": undecided}
