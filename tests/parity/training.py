"""One row on one rank: train the parameters of a row, and compare them with the row's reference."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.c10d_counter import CollectiveCounter
from tests.parity.layouts import DEVICE, LAYOUTS, SPLITS, Layout, drawn, like, matrices, mesh_of, placed
from tests.parity.references import LR, RATES, REFERENCES, Options, Reference, groups
from tests.shared import local, message, muon_keywords
from titan_muon import Muon, apply_in_forward, own
from titan_muon.engine.program.program import make_program
from titan_muon.engine.tensors.dtensor import copy_rows, own_rows

STEPS = 3
DROP, ELSEWHERE = "drop", "elsewhere"
"""A gradient that is absent, or replicated instead of sharded, on the last rank."""


@dataclass(frozen=True)
class Row:
    """A claim: training in some layouts has the bits of the reference.

    Attributes:
        shapes: the parameters of each layout.
        options: of Muon alone.
        math: options of Muon and of the reference.
        groups: hyperparameters of a second group with every other parameter, if any.
        sharded: FSDP2, DDP or `own` place modules, and gradients come from a backward pass.
        gradients: by step, a change of the gradients of parameters by the end of their names.
        between: by step, an action after that step.
        scaler: a GradScaler drives the steps, and skips one more for each. "unscaled": the caller unscales gradients.
        proof: whether the plan has the property that the row is about.
        error: texts in the error of the step after the last one on every rank.
        group: axes of a mesh; the ranks along its "shard" are the process group of Muon.
        talks: sizes of the process groups with a collective in the last step, if the row is about them.
        close: the largest relative error of the change of a weight, instead of equal bits.
        dtype: of weights and gradients.
        ns_dtype: of Newton-Schulz in the reference.
    """

    name: str
    world: int
    layouts: tuple[str, ...]
    shapes: tuple[str, ...]
    options: Options = field(default_factory=dict)
    math: Options = field(default_factory=dict)
    reference: str = "torch"
    groups: Options = field(default_factory=dict)
    sharded: bool = False
    gradients: Mapping[int, tuple[str, Any]] = field(default_factory=dict)
    between: Mapping[int, str] = field(default_factory=dict)
    scaler: str = ""
    closure: bool = False
    proof: str = ""
    error: tuple[str, ...] = ()
    group: str = ""
    talks: tuple[int, ...] | None = None
    close: float = 0.0
    dtype: torch.dtype = torch.float32
    ns_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name

    def layout_of(self, name: str) -> str:
        return self.layouts[int(name.split(".")[1])]


class Layer(nn.Module):
    """Parameters of one layout. The forward pass returns a loss with given gradients."""

    def __init__(self, number: int, layout: Layout, row: Row) -> None:
        super().__init__()
        self.number, self.names = number, row.shapes
        for name in row.shapes:
            value = drawn(f"layers.{number}.{name}", 0).to(row.dtype)
            if "tp" in layout.axes and (row.sharded or layout.owned):
                mesh = mesh_of(layout.axes, layout.ranks)["tp"]
                value = distribute_tensor(value, mesh, layout.placements[-1:], src_data_rank=None)
            elif not row.sharded:
                value = placed(value, layout)
            parameter = nn.Parameter(value)
            # As under Megatron-FSDP, a new parameter loses the rows.
            copy_rows(value, parameter)
            self.register_parameter(name, parameter)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        loss = torch.zeros(())
        for name in self.names:
            if f"layers.{self.number}.{name}" not in grads:
                continue
            weight: Any = getattr(self, name)
            grad = like(grads[f"layers.{self.number}.{name}"].to(weight.dtype), weight)
            if isinstance(weight, DTensor):
                weight = weight.to_local()
            loss = loss + (weight * local(grad)).sum()
        return loss


class Model(nn.Module):
    """A layer for each layout of a row."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        layouts = [LAYOUTS[name] for name in row.layouts]
        self.layers = nn.ModuleList(Layer(number, layout, row) for number, layout in enumerate(layouts))
        for layer, layout in zip(self.layers, layouts, strict=True):
            if layout.owned:
                own(layer, mesh=layout.mesh, params=list(layer.parameters()))
            elif row.sharded and layout.placements and layout.axes != "tp":
                names = tuple(axis for axis in layout.axes.split() if axis != "tp")
                fully_shard(layer, mesh=layout.mesh[names])
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # gloo has no PREMUL_SUM.
                module.set_force_sum_reduction_for_comms(True)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return sum((layer(grads) for layer in self.layers), torch.zeros(()))


class Training:
    """The model and the Muon of a row."""

    def __init__(self, row: Row) -> None:
        self.row, self.model = row, Model(row)
        # As torchrun would on such nodes.
        rank, nodes = dist.get_rank(), getattr(row.options.get("machine"), "ranks_per_node", None) or row.world
        place = rank % nodes
        os.environ.update(LOCAL_RANK=str(place), LOCAL_WORLD_SIZE=str(min(nodes, row.world - rank + place)))
        self.params = dict(self.model.named_parameters())
        self.muon = self.optimizer(self.params)
        self.forward: nn.Module = self.model
        if row.sharded and set(row.layouts) == {"plain"}:
            self.forward = DistributedDataParallel(self.model)
        if row.options.get("overlap") == "forward":
            apply_in_forward(self.model, self.muon)
        self.scaler = GradScaler(DEVICE.type, init_scale=2.0**10) if row.scaler else None
        self.elsewhere = set[str]()

    def optimizer(self, params: Mapping[str, nn.Parameter]) -> Muon:
        given = groups(params, self.row.groups)
        splits = [split for split in SPLITS if split.match.removeprefix("*.") in self.row.shapes]
        defaults = {"lr": LR, "orthogonalize": "reference", "split": splits}
        if self.row.group:
            defaults["process_group"] = mesh_of(self.row.group, ())["shard"].get_group()
        muon = Muon(given, **muon_keywords(**(defaults | dict(self.row.math) | dict(self.row.options))))
        for group in muon.param_groups:
            group["initial_lr"] = group["lr"]
        return muon

    def step(self, number: int, grads: Mapping[str, Tensor], absent: set[str]) -> None:
        for group in self.muon.param_groups:
            group["lr"] = group["initial_lr"] * RATES[number]
        if self.scaler is not None:
            self._skipped_by_the_scaler(grads)
            grads = self._scaled(grads)
        if self.row.closure:
            assert self.muon.step(lambda: self._set(grads, absent) or 7.0) == 7.0
        else:
            self._set(grads, absent)
            self._scaler_step() if self.scaler is not None else self.muon.step()
        if self.row.options.get("release_grads", False):
            assert not any(local(p.grad).numel() for p in self.params.values() if p.grad is not None)
        self.muon.zero_grad()

    def step_on(self, seed: int) -> None:
        self.step(0, {name: drawn(name, seed) for name in self.params}, set())

    def _skipped_by_the_scaler(self, grads: Mapping[str, Tensor]) -> None:
        spoiled = self._scaled(grads)
        next(iter(spoiled.values())).view(-1)[-1] = torch.inf
        self._set(spoiled, set())
        self._scaler_step()
        self.muon.zero_grad()

    def _scaler_step(self) -> None:
        if self.row.scaler == "unscaled":
            self.scaler.unscale_(self.muon)
        self.scaler.step(self.muon)
        self.scaler.update()

    def _scaled(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: grad * self.scaler.scale(torch.ones(())).item() for name, grad in grads.items()}

    def _set(self, grads: Mapping[str, Tensor], absent: set[str]) -> None:
        if self.row.sharded:
            # Two microbatches.
            half = {name: grad / 2 for name, grad in grads.items()}
            for _ in range(2):
                self.forward(half).backward()
        else:
            for name, param in self.params.items():
                param.grad = self._grad(name, grads[name].to(param.dtype))
        for name in absent:
            self.params[name].grad = None
        for name in self.elsewhere:
            param: Any = self.params[name]
            copies = [Replicate()] * param.device_mesh.ndim
            whole = grads[name].to(param.dtype, copy=True)
            param.grad = distribute_tensor(whole, param.device_mesh, copies, src_data_rank=None)

    def _grad(self, name: str, whole: Tensor) -> Tensor | None:
        param = self.params[name]
        if not isinstance(param, DTensor):
            return like(whole, param)
        # Only ranks of the mesh have a gradient, of an owned parameter only owners, and no empty range of rows.
        on_mesh = param.device_mesh.get_coordinate() is not None
        if own_rows(param) is not None and local(param).numel() == 0:
            return None
        return torch.empty_like(param).copy_(like(whole, param)) if on_mesh else None

    def differences(self, reference: Reference, excluded: set[str]) -> list[str]:
        """Tensors of this rank that differ from the reference."""
        self.muon.finish_step()
        compare = self._far if self.row.close else self._different
        return [
            f"{self.row.layout_of(name)}: {name.rpartition('.')[2]}: {key}"
            for name, param in self.params.items()
            if name not in excluded
            for key in compare(name, param, reference)
        ]

    def _far(self, name: str, param: Tensor, reference: Reference) -> Iterator[str]:
        initial, expected = (local(like(whole, param)) for whole in (drawn(name, 0), reference.weight(name)))
        error = (local(param) - expected).norm() / (expected - initial).norm().clamp(min=1e-6)
        if not error < self.row.close:
            yield f"weight is {error:.1e} away"

    def _different(self, name: str, param: Tensor, reference: Reference) -> Iterator[str]:
        if not torch.equal(local(param), local(like(reference.weight(name), param))):
            yield "weight"
        expected, ours = reference.states(name), self.muon.state[param]
        assert set(ours) == set(expected), f"states {sorted(ours)}, and the reference has {sorted(expected)}"
        for key, value in ours.items():
            # The state of a matrix is whole on its owner, and absent elsewhere. Without a momentum its place is empty.
            of_matrix = "." in key or not expected[key].numel()
            whole = expected[key] if of_matrix else like(expected[key], param)
            if local(value).shape == local(whole).shape:
                if local(value).dtype != whole.dtype or not torch.equal(local(value), local(whole)):
                    yield key
            elif self.row.options.get("state") != "owner" and local(value).numel():
                yield f"{key} of shape {tuple(local(value).shape)}"


# --- actions between steps ---


def swap_data(training: Training) -> None:
    """New storage for each parameter. An assignment to `data` leaves a DTensor's local tensor where it is."""
    for param in training.params.values():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad))


def replace_parameters(training: Training) -> None:
    """As Accelerate does after the construction of an optimizer."""
    new = {name: nn.Parameter(param.detach().clone()) for name, param in training.params.items()}
    training.params = new
    for group in training.muon.param_groups:
        group["params"] = [new[name] for name in group["param_names"]]
    training.muon.rebuild()


def new_optimizer(training: Training) -> None:
    state = copy.deepcopy(training.muon.state_dict())
    training.muon.close()
    training.muon = training.optimizer(training.params)
    training.muon.load_state_dict(state)


def freeze(training: Training, end: str) -> None:
    """Train the parameters whose names have another end."""
    for name, param in training.params.items():
        param.requires_grad_(not name.endswith(end))
    training.muon.rebuild()


ACTIONS: dict[str, Callable[[Training], Any]] = {
    "swap_data": swap_data,
    "swap_and_rebuild": lambda training: (swap_data(training), training.muon.rebuild()),
    "replace_parameters": replace_parameters,
    "reload": lambda training: training.muon.load_state_dict(copy.deepcopy(training.muon.state_dict())),
    "new_optimizer": new_optimizer,
    "move_to_host": lambda training: training.muon.offload(),
    "move_to_host_and_back": lambda training: (training.muon.offload(), training.muon.reload()),
    "check": lambda training: (training.muon.check_last_step(), training.muon.check_replicas()),
    "freeze": partial(freeze, end="tall"),
    "thaw": partial(freeze, end="none"),
}


def hopping(muon: Muon) -> bool:
    """Whether pieces pass through another rank."""
    runs = make_program(muon.plan, dist.get_rank()).buckets
    return any(run.gathering.hop is not None and run.gathering.travels for run in runs)


PROOFS: dict[str, Callable[[Muon], bool]] = {
    "two hops": hopping,
    "hops beside replicas": lambda muon: hopping(muon) and "instead of two_hops: replicas" in muon.plan.reason,
    "several buckets": lambda muon: len(muon.plan.buckets) > 2,
    "hierarchical": lambda muon: "hierarchical" in {bucket.exchange for bucket in muon.plan.buckets},
    "batches": lambda muon: any(work.batch > 1 for work in muon.plan.works),
}


def gradients(training: Training, number: int) -> tuple[dict[str, Tensor], set[str], set[tuple[str, int]]]:
    """Whole gradients of a step, parameters without one on this rank, and matrices that the reference leaves out."""
    row = training.row
    grads = {name: drawn(name, number + 1) for name in training.params}
    end, change = row.gradients.get(number, ("nothing", None))
    spoiled = [name for name in grads if name.endswith(end)]
    counts = {name: len(matrices(name, grad)) for name, grad in grads.items()}
    frozen = {name for name, param in training.params.items() if not param.requires_grad}
    unusable = {*spoiled} if change in (DROP, ELSEWHERE) else set()
    left_out = {(name, index) for name in frozen | unusable for index in range(counts[name])}
    for name in set(spoiled) - unusable:
        # In the last matrix of a stack alone.
        last = grads[name] if grads[name].ndim == 2 else grads[name][-1]
        if change == 0.0:
            last.zero_()
        else:
            last.view(-1)[-1] = change
            left_out.add((name, counts[name] - 1))
    here = dist.get_rank() == row.world - 1
    training.elsewhere = unusable if here and change == ELSEWHERE else set()
    return grads, frozen | (unusable if here and change == DROP else set()), left_out


class Twin:
    """Muon in the same layout with the options of `math` alone."""

    def __init__(self, row: Row) -> None:
        self.training = Training(replace(row, options={}))

    def step(self, number: int, grads: Mapping[str, Tensor], left_out: set[tuple[str, int]]) -> None:
        self.training.step(number, grads, set())

    def weight(self, name: str) -> Tensor:
        return self.training.params[name].detach()

    def states(self, name: str) -> dict[str, Tensor]:
        return dict(self.training.muon.state[self.training.params[name]])


def reference_of(row: Row, names: list[str]) -> Reference:
    if row.reference == "twin":
        return Twin(row)
    dtype = row.ns_dtype if row.reference == "paper" else row.dtype
    return REFERENCES[row.reference](names, row.math, row.groups, dtype)


def differences(rank: int, world_size: int, row: Row) -> list[str]:
    """Train a row. Differences from its reference, and expected texts that the error of the next step lacks."""
    training = Training(row)
    reference = reference_of(row, list(training.params))
    for number in range(STEPS):
        grads, absent, left_out = gradients(training, number)
        if row.error and number == STEPS - 1:
            training.muon.finish_step()
        before = {name: local(param).clone() for name, param in training.params.items()}
        with CollectiveCounter() as counter:
            training.step(number, grads, absent)
        if left_out and row.options.get("on_bad_gradient") == "skip_step":
            # A bad gradient skips the whole step.
            left_out = set()
        else:
            reference.step(number, grads, left_out)
        if number in row.between:
            ACTIONS[row.between[number]](training)
    assert not row.proof or PROOFS[row.proof](training.muon), f"the plan has no {row.proof}"
    talked = {call.group_size for call in counter.calls}
    if row.talks is not None:
        expected = talked and talked <= {*row.talks} if row.talks else not talked
        assert expected, f"collectives of groups of {talked} ranks"
    spoiled = {name for name, _ in left_out} if row.error else set()
    different = training.differences(reference, spoiled)
    for name in spoiled:
        if row.gradients[number][1] == DROP and LAYOUTS[row.layout_of(name)].has_replicas:
            # The owner may have all shards from a replica with a gradient.
            continue
        if row.dtype == torch.bfloat16 and name not in training.elsewhere:
            # The decay is rounded stochastically.
            continue
        # A rank with a gradient decays its shard, unless the gradient has another placement.
        decays = (1.0,) if name in training.elsewhere else (1.0, 1 - LR * RATES[number] * 0.1)
        if not any(torch.equal(local(training.params[name]), before[name] * decay) for decay in decays):
            different.append(f"{name} moved")
    if row.error:
        error = message(partial(training.step, number, gradients(training, number + 1)[0], set()))
        different += [f"no {text!r} in {error!r}" for text in row.error if text not in error]
    training.muon.close()
    return different
