"""What the library refuses or warns of, and with which words: a row is a call and the start of its text.

To add a row, write the call behind `lambda:` and the text of its error behind it. `...` stands for any text, and a row
belongs below the comment of its subject. Refusals after which something must be unchanged have tests of their own.
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import lr_scheduler

from tests.shared import muon_keywords
from tests.unit.plans import either_plan, mesh_of, parameter_of
from tests.unit.test_hybrid import Decoder
from titan_muon import (
    Expert,
    Hybrid,
    Muon,
    Rule,
    Split,
    as_torch,
    clip_grad_norm_,
    converted,
    head_splits,
    own,
    registry,
)
from titan_muon.adamw import AdamW
from titan_muon.engine.layout.intervals import check_rows
from titan_muon.engine.layout.types import Interval, Layout, Mesh, Replicate
from titan_muon.engine.layout.types import Shard as Cut
from titan_muon.engine.orthogonalize import coefficients
from titan_muon.engine.step.muon import MuonAlgorithm, lr_factor
from titan_muon.forecast.fake_world import fake_world
from titan_muon.kernels.dispatch import Dispatch, kernels_for
from titan_muon.matrices.stacks import check_splits, stack_of
from titan_muon.options import Machine, MuonOptions, OptionError
from titan_muon.owned.param import place_on_owners
from titan_muon.planner.machine import planning_machine
from titan_muon.plugins.qk_clip import AttentionLayer, HeadRows, HeadWeight, QKClip, query_rows
from titan_muon.ranges import FRACTION


def weight(*shape: int, **kind: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (16, 16), **kind))


def muon(*params: Any, **options: Any) -> Muon:
    """A built Muon, by default of a single matrix `w`."""
    given = [*params] or [("w", weight())]
    return Muon(given, **muon_keywords(**options)).build()


def grouped(whole: dict[str, Any] | None = None, **keys: Any) -> Muon:
    """A built Muon with these keywords, and keys of the second group; its parameter is `w1`."""
    return muon({"params": [("w0", weight())]}, {"params": [("w1", weight())], **keys}, **(whole or {}))


def added(**group: Any) -> None:
    """A group that is added to a Muon."""
    muon().add_param_group({"params": [weight()], "param_names": ["v"], **group})


def hybrid(**options: Any) -> Any:
    return Hybrid(Decoder(), **options)


def ruled(match: str, optimizer: str = "muon", **options: Any) -> Any:
    return hybrid(rules=[Rule(match=match, optimizer=optimizer, options=options)])


def split(dims: str, shape: tuple[int, ...] = (6, 4), **lengths: Any) -> Any:
    return stack_of("layers.0.w", shape, [Split(match="*", dims=dims, lengths=lengths)])


def from_dion(**changes: Any) -> Any:
    """A Hybrid of dion's groups, the group of Muon changed."""
    model = Decoder()
    matrices = [block.up.weight for block in model.layers]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, **changes}, {"params": rest, "algorithm": "adamw", "lr": 3e-4}]
    return Hybrid.from_groups(model, groups)


def from_keller(*, muon: Any = None, also: str = "", use_muon: bool | None = True) -> Any:
    """A Hybrid of Keller Jordan's groups, with another parameter in the group of Muon."""
    model = Decoder()
    names = {name for name, _ in model.named_parameters() if name.endswith("up.weight")}
    adamw = {"params": [p for name, p in model.named_parameters() if name not in names], "use_muon": False}
    matrices = {"params": [p for name, p in model.named_parameters() if name in names | {also}], "use_muon": use_muon}
    groups = [adamw, {key: value for key, value in matrices.items() if value is not None}]
    return Hybrid.from_groups(model, groups, muon=muon)


def saved(**options: Any) -> Any:
    """The state dict of a Muon after a step."""
    param = weight()
    made = muon(("w", param), **options)
    param.grad = torch.ones_like(param)
    made.step()
    return made.state_dict()


def cycling(scheduler: Any) -> None:
    """A scheduler of PyTorch that cycles the momentum."""
    made = hybrid()
    scheduler(made)
    made.step()


def of_dion() -> dict[str, Any]:
    """A state dict of dion whose scale has no name here."""
    keys = {"lr": 0.02, "mu": 0.9, "weight_decay": 0.1, "nesterov": True, "adjust_lr": None, "epsilon": 1e-8}
    group = {**keys, "algorithm": "muon", "params": [0]}
    return {"state": {0: {"momentum": torch.ones(16, 16)}}, "param_groups": [group]}


def attention(heads: int, *rows: HeadWeight, thresholds: tuple[float, ...] = ()) -> QKClip:
    return QKClip([AttentionLayer("a", heads, rows, thresholds)])


def step_without(grads: tuple[str, ...], sparse: str = "") -> None:
    """The first step of parameters a and b where only some have a gradient."""
    params = {name: weight() for name in ("a", "b")}
    made = Muon([*params.items()])
    for name in grads:
        params[name].grad = torch.ones(16, 16).to_sparse() if name == sparse else torch.ones(16, 16)
    made.step()


def changed(change: Callable[[Any], object], kind: Any = Muon) -> None:
    """A step after a change of an optimizer of a, b and c."""
    params = {name: weight() for name in "abc"}
    built = kind(params.items())
    for act in (change, str):
        for param in params.values():
            param.grad = torch.ones_like(param)
        built.step()
        act(built)


def lost(built: Any) -> None:
    """Names of the remaining parameters would move to others."""
    del built.param_groups[0]["params"][1]


def not_finite(*, clip: bool) -> None:
    param = weight()
    made = muon(("w", param), on_bad_gradient="skip_step")
    param.grad = torch.full((16, 16), torch.nan)
    if clip:
        clip_grad_norm_([param], 1.0, optimizer=made)
    made.step()
    made.step()
    made.check_last_step()


def flattened(count: int) -> None:
    """As DeepSpeed ZeRO does after the construction of an optimizer."""
    given = Muon([(f"layers.{i}.w", weight()) for i in range(count)])
    given.param_groups[0]["params"] = [weight(256 * count)]
    given.build()


def owned_only(option: str, value: str) -> None:
    """An option of travelling matrices where all matrices are owned. A sharded one beside them uses it."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        owned = ("layers.0.w", place_on_owners(weight(8, 8), mesh, [0]))
        sharded = ("layers.1.w", nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])))
        assert muon(owned, sharded, **{option: value}).plan.buckets
        muon(owned, **{option: value})


def owner_of_owned() -> None:
    with fake_world(2):
        model = nn.Linear(8, 8, bias=False)
        own(model, mesh=init_device_mesh("cpu", (2,)))
        Muon(model.named_parameters(), state="owner").build()


def ranges(size: tuple[int, ...], *rows: tuple[int, int]) -> None:
    """A (12, 4) matrix whose ranks have these rows."""
    mesh = Mesh(size, tuple(range(math.prod(size))))
    placements = (*[Replicate()] * (len(size) - 1), Cut(0))
    check_rows(Layout((12, 4), mesh, placements, rows=tuple(Interval(*pair) for pair in rows)))


@dataclass(frozen=True)
class Own:
    share: Annotated[float, FRACTION] = 0.5
    form: Literal["a", "b"] = "a"
    count: int = 1

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("13 brings bad luck")


class WithOptions(MuonAlgorithm):
    Options = Own


class Refusing(MuonAlgorithm):
    def check_group(self, group: Any) -> None:
        raise OptionError("nesterov", "is not for this rule")


def mine(**options: Any) -> Muon:
    """Options of algorithms by name, where the algorithm `mine` is of another package."""
    return muon(algorithm=["mine", "muon"], algorithm_options=options)


SPHERE: Any = {"algorithm": "muonh", "weight_decay": 0.0}
TORCHS = torch.optim.Muon([weight()]).state_dict()
DIMS = "layers.0.w: muon.split: dims = ..."
ADAMW = Rule(match="*.up.weight", optimizer="adamw")
CYCLE = "...cannot cycle Muon's momentum and AdamW's betas ... cycle_momentum=False"
NAMES = "it takes a name, or a list of different names"
MUON = "..., and Muon"
META = {"device": "meta"}
FOUR = [parameter_of(f"{i}.w", (64, 64), mesh_of(4), Cut(0)) for i in range(4)]
CANS = (
    *((8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630)),
    *((3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162)),
)
"""As published: each step ends where the next begins to diverge."""
CLIPPED = HeadWeight("wq", torch.ones(8, 2), query_rows(4))
ONE_HEAD = HeadWeight("w", torch.ones(8, 2), (HeadRows(4, "query", 1),))

# fmt: off
REFUSALS: list[tuple[Callable[[], object], str]] = [
    # Keywords of Muon and of Expert
    (lambda: muon(learning_rate=1), "...no keyword learning_rate. ...Did you mean lr...weight_decay"),
    (lambda: Muon([], exchange=1), "...no keyword exchange. ...Did you mean expert=Expert(exchange=...)?"),
    (lambda: Muon([], missing_grad=1), "...no keyword missing_grad. ...expert=Expert(on_bad_gradient=...)?"),
    (lambda: muon(zzz=1), "...no keyword zzz...It takes...weight_decay"),
    (lambda: Muon([], expert={"exchange": "all_gather"}), "expert = ... write expert=titan_muon.Expert"),
    # Removed options
    (lambda: muon(overlap="backward"), "overlap = 'backward' was removed: ...set 'forward'"),
    (lambda: Expert(split_over=2), "split_over was removed: ...leave it out"),
    (lambda: Hybrid(nn.Linear(4, 4), tp_mode="owner"), "tp_mode was removed: ...leave it out"),
    (lambda: Expert(whole_freq=5), "whole_freq was removed: ...leave it out"),
    (lambda: own(nn.Linear(4, 4), tp_pieces="whole"), "tp_pieces was removed: ...leave it out"),
    (lambda: Muon([], block_lr_scale=0.5), "block_lr_scale was removed with whole_freq"),
    (lambda: muon(on_bad_gradient="skip_nonfinite"), "...was removed, because undoing parts of a step"),
    (lambda: muon(ns_kernel="quack"), "ns_kernel = 'quack' was removed: no run measured it; set 'auto' or 'triton'"),
    (lambda: muon(ns_coefficients="aol"), "...was removed: it scaled rows and no run gained by it; set another set"),
    # Values
    (lambda: muon(lr="1e-3"), "lr = '1e-3' is not accepted"),
    (lambda: muon(lr=-1e-3), "lr = -0.001 ...it takes 0 or more"),
    (lambda: muon(momentum=1.0), "momentum = 1.0 ...it takes a number from 0 to less than 1"),
    (lambda: muon(ns_steps=0), "ns_steps = 0 ...it takes 1 or more"),
    (lambda: muon(eps=0.0), "eps = 0.0 ...it takes more than 0"),
    (lambda: muon(adjust_lr_fn="adam"), "adjust_lr_fn = ...match_rms_adamw, original, spectral_unclamped, or a number"),
    (lambda: muon(adjust_lr_fn=True), "adjust_lr_fn = True is not accepted"),
    (lambda: muon(adjust_lr_fn=0.0), "adjust_lr_fn = 0.0 is not accepted"),
    (lambda: lr_factor("rms", 2, 2), "adjust_lr_fn = ...match_rms_adamw, original, spectral_unclamped"),
    (lambda: muon(momentum_warmup_steps=-1), "momentum_warmup_steps = -1 is not accepted"),
    (lambda: muon(exchange="all_to_al"),
     "exchange = ...is not one of all_to_all, two_hops, all_gather, all_gather_reduce_scatter"),
    (lambda: muon(on_bad_gradient=None), "on_bad_gradient = None is not one of error, skip_missing, skip_step"),
    (lambda: muon(replicas="both"), "replicas = 'both' is not one of auto, split, redundant"),
    (lambda: muon(algorithm={"muon"}), f"algorithm = ...{NAMES}"),
    (lambda: muon(algorithm=["muon", "muon"]), f"algorithm = ...{NAMES}"),
    (lambda: muon(algorithm="normoun"), "algorithm = 'normoun' is unknown; did you mean 'normuon'"),
    (lambda: muon(split=[{"match": "*"}]), "split...split=[titan_muon.Split("),
    (lambda: muon(split=Split(match="*", dims="f d -> | f d")), "split...split=[titan_muon.Split("),
    # Options that do not fit each other
    (lambda: muon(algorithm="muonh"), "weight_decay = 0.1: algorithm = 'muonh' keeps the norm"),
    (lambda: muon(**SPHERE, cautious=True), "cautious = True changes weight decay"),
    (lambda: muon(**SPHERE, decay_follows_lr=True), "decay_follows_lr = True changes weight decay"),
    (lambda: muon(**SPHERE, overlap="forward"), "overlap = 'forward' applies updates in forward"),
    (lambda: muon(**SPHERE, offload="parameters"), "offload = 'parameters'"),
    (lambda: muon(beta2=0.9), "beta2 = 0.9 has no effect without algorithm = 'normuon', 'adamuon' or 'soap'; set both"),
    (lambda: muon(soap_freq=5), "soap_freq = 5 has no effect without algorithm = 'soap'; set both, or neither"),
    (lambda: muon(momentum_start=0.5), "momentum_start = 0.5 has no effect without momentum_warmup_steps"),
    (lambda: muon(algorithm=["normuon", "adamuon"]),
     "algorithm = ['normuon', 'adamuon']: two of these keep a state of the same name; take one of them"),
    (lambda: muon(algorithm=["soap", "adamuon"]), "...two of these change the momentum; take one of them"),
    (lambda: muon(algorithm=["soap", "muonh"]), "...two of these change the update of the weights; take one of them"),
    (lambda: muon(algorithm="soap", state_dtype="bfloat16"), "state_dtype = 'bfloat16'...set 'float32'"),
    (lambda: muon(algorithm="soap", offload="state"), "offload = 'state' does not fit algorithm = 'soap'"),
    (lambda: muon(algorithm="soap", offload="parameters"), "offload = ...CPUOffloadPolicy implies 'parameters'"),
    (lambda: muon(algorithm="soap").offload(), "offload = 'state' does not fit"),
    (lambda: muon(algorithm="soap", state="owner"), "...all states are on the owner already; set 'replicated'"),
    (lambda: muon(algorithm="soap", momentum_warmup_steps=3), "momentum_warmup_steps = 3 does not fit"),
    (lambda: muon(algorithm="soap", ns_kernel="plain"), "ns_kernel = ...it has no Newton-Schulz; set 'auto'"),
    (lambda: muon(algorithm="soap", ns_dtype="float32"), "ns_dtype = 'float32' does not fit"),
    (lambda: muon(algorithm="soap", ns_steps=7), "ns_steps = 7 has no effect"),
    (lambda: muon(algorithm="soap", adjust_lr_fn="original"),
     "adjust_lr_fn = 'original' has no effect with algorithm = 'soap'"),
    (lambda: muon(state_dtype="int8", offload="state"), "...int8"),
    (lambda: muon(state_dtype="int8", state="owner"), "...int8"),
    (lambda: muon(("w", weight(64, 64, 3)), split=[Split(match="w", dims="o i k -> | o (i k)")], state_dtype="int8"),
     "state_dtype = 'int8'...w has 3 columns on 1 ranks, which cut blocks"),
    (lambda: muon(state="owner", exchange="all_gather_reduce_scatter"),
     "state = 'owner': exchange = ... or state = 'replicated'"),
    (lambda: muon(state="owner", replicas="redundant"), "state = 'owner': replicas = ... or state = 'replicated'"),
    (owner_of_owned, 'state = "owner": weight is owned, and its momentum is on its owner alone already'),
    (lambda: muon(state="owner", planner="rule"), "state = 'owner' needs planner = 'search'"),
    (lambda: muon(exchange="two_hops", planner="rule"), "exchange = 'two_hops' needs...set planner = 'search'"),
    (lambda: muon(fused=True), "fused = True needs Triton, which does not run on cpu; install"),
    (lambda: muon(fused=True, state_dtype="int8"),
     "fused = True has no kernels: state_dtype = 'int8' has a momentum of its own; set 'auto'"),
    (lambda: muon(cuda_graph=True), "cuda_graph = True captures a step on a GPU, not on cpu; set False"),
    *((lambda name=name, value=value: muon(cuda_graph=True, **{name: value}),
       f"cuda_graph = True does not take {name} = {value!r}, because ... or cuda_graph = False")
      for name, value in (("release_grads", True), ("offload", "state"), ("overlap", "forward"))),
    (lambda: kernels_for("triton", torch.device("cpu")), "ns_kernel = 'triton' needs CUDA and the package triton"),
    (lambda: owned_only("overlap", "forward"), "overlap = 'forward' has no effect: ...(layers.0.w), and no other"),
    (lambda: owned_only("exchange", "all_gather"),
     "exchange = 'all_gather' has no effect: ...(layers.0.w), and no other"),
    # Coefficients, and the method that computes them
    (lambda: muon(ns_coefficients=()), "ns_coefficients = () ...pion_promotion, or a list that is not empty"),
    (lambda: coefficients("keller_jordon", 5), "...is not one of keller_jordan, ...; did you mean 'keller_jordan'?"),
    (lambda: coefficients("you_jiacheng", 4), "...has 5 steps but ns_steps = 4"),
    (lambda: coefficients([[1, 2, math.nan]], 1), "...not three finite numbers"),
    (lambda: coefficients([1.0, 2.0, 3.0], 3), "...not three finite numbers"),
    (lambda: Dispatch(dtype="float32").choose(1024, 4096, ((0.0, 5.0, -1.5),) * 5), "...diverge"),
    (lambda: Dispatch("gram", dtype="bfloat16"), "...'gram' diverges in it; choose 'float16' or 'float32'"),
    (lambda: Dispatch("reference", dtype="float32"), "...'reference' is torch.optim.Muon's arithmetic"),
    # Parameters
    (lambda: Muon(Decoder()), "...titan_muon.Hybrid(model)"),
    (lambda: Muon(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).parameters()), "...titan_muon.Hybrid(model)"),
    (lambda: Muon([("w", weight(4, 6, dtype=torch.complex64))]), f"w: has dtype torch.complex64{MUON}"),
    (lambda: Muon([("w", weight(4))]), "w: Muon takes matrices"),
    (lambda: muon(("w", weight(**META))), "w: on the meta device"),
    (lambda: muon({"params": [weight(), weight()], "param_names": ["w"]}),
     "...2 parameters and 1 names...ZeroRedundancy"),
    (lambda: (param := weight()) is muon(("a", param), ("b", param)),
     "b: is the same tensor as a; give every parameter"),
    (lambda: flattened(1), "layers.0.w: Muon takes matrices ...DeepSpeed ZeRO... fully_shard (FSDP2)"),
    (lambda: flattened(2), "...1 parameters and 2 names...DeepSpeed ZeRO... fully_shard (FSDP2)"),
    (lambda: muon(("w", weight(dtype=torch.bfloat16)), **SPHERE),
     "algorithm = 'muonh' needs float32 weights...: w; keep the weights in float32"),
    (lambda: step_without(("b",)), "no gradient for a: use the parameter in the loss"),
    (lambda: step_without(("a", "b"), "b"), "b: the gradient is sparse, ... torch.optim.SparseAdam"),
    (lambda: changed(lambda built: built.close()), "...this Muon was closed"),
    (lambda: changed(lost), "param_groups: the group of a has 2 parameters and 3 names; "),
    (lambda: changed(lost, AdamW), "param_groups: the group of a has 2 parameters and 3 names; "),
    (lambda: changed(lambda built: next(iter(built.state.values())).update(momentum_buffer=torch.zeros(3, 3))),
     "...momentum was replaced"),
    *((lambda change=change: changed(lambda built: built.param_groups[0].update(change)),
       "a...: ns_steps, ns_coefficients, eps or algorithm changed since Muon was built")
      for change in ({"ns_steps": 4}, {"eps": 1e-3}, {"algorithm": "normuon"}, {"ns_coefficients": [[3, -4, 2]]})),
    # Keys of groups
    (lambda: grouped(algorithm=3), f"algorithm = 3 is not accepted; {NAMES}, in the group of w1"),
    (lambda: grouped(algorithm="adamw"), "algorithm = 'adamw' marks parameters of another algorithm; ...adamw.AdamW"),
    (lambda: grouped(algorithm="muonh", weight_decay=0.2),
     "...keeps the norm of each matrix instead; set 0, in the group of w1"),
    (lambda: grouped({"state_dtype": "int8"}, algorithm="soap"),
     "state_dtype = 'int8' does not fit algorithm = 'soap'"),
    (lambda: grouped({"overlap": "forward"}, **SPHERE), "overlap = 'forward' applies updates in forward"),
    (lambda: grouped({"beta2": 0.9}, algorithm="muoneq"), "beta2 = 0.9 has no effect without"),
    (lambda: added(maximize=True), "maximize is not a key of a Muon group; negate the loss"),
    (lambda: added(momentun=0.9), "momentun is not a key of a Muon group; did you mean momentum"),
    (lambda: added(lr_scale="original"), "lr_scale is not a key of a Muon group; did you mean adjust_lr_fn"),
    (lambda: added(exchange="all_gather"),
     "exchange holds for all parameters of a Muon; pass expert=Expert(exchange=...)"),
    (lambda: added(use_muon=False), "use_muon = False marks ... titan_muon.adamw.AdamW, ... titan_muon.Hybrid"),
    # Algorithms of other packages, and their options
    (lambda: muon(algorithm="refusing"), "nesterov is not for this rule"),
    (lambda: mine(mine={"shar": 0.1}), "algorithm_options.mine.shar is unknown; leave it out: ... share, form, count"),
    (lambda: mine(mine={"share": "x"}), "algorithm_options.mine.share = 'x' is not accepted; it takes a number"),
    (lambda: mine(mine={"count": True}), "algorithm_options.mine.count = True is not accepted; it takes an integer"),
    (lambda: mine(mine={"share": 1}), "algorithm_options.mine.share = 1.0 ... it takes a number from 0 to less"),
    (lambda: mine(mine={"form": "c"}), "algorithm_options.mine.form = 'c' is not one of a, b"),
    (lambda: mine(mine={"count": 13}), "algorithm_options.mine = ... is not accepted: 13 brings bad luck"),
    (lambda: mine(mien={}), "algorithm_options.mien belongs to no algorithm; did you mean 'mine'"),
    (lambda: mine(muon={"share": 1}), "algorithm_options.muon.share is unknown; ... has no options of its own"),
    # Matrices of a parameter
    (lambda: stack_of("a.w", (4,)), "a.w: Muon takes matrices ...FSDP1"),
    (lambda: stack_of("a.w", (2, 2, 2, 2)), "a.w: Muon takes matrices ...give it to another optimizer"),
    (lambda: stack_of("a.w", (0, 4)), "a.w: Muon takes matrices"),
    (lambda: check_splits(["w"], [Split(match="o", dims="f d -> | f d")]), "muon.split: 'o' matches no Muon parameter"),
    (lambda: split("(g f) d -> g | f d"), f"{DIMS}leaves the lengths of g, f open"),
    (lambda: split("(g f) d -> g | f d", g=5), f"{DIMS}does not fit the shape (6, 4): g = 5 does not fill 6"),
    (lambda: split("(g f) d -> g | f d", g=(2, 3)), f"{DIMS}does not fill 6"),
    (lambda: split("f d -> | f d", z=2), f"{DIMS}no axis 'z'"),
    (lambda: split("f d -> | f d", f=(2, -1)), f"{DIMS}lengths.f a whole number from 1 on"),
    (lambda: split("f d -> | f d", f=(2, 4)), f"{DIMS}only an axis before the bar has parts"),
    (lambda: split("f d -> f d"), f"{DIMS}no arrow and bar"),
    (lambda: split("f d -> f | d"), f"{DIMS}has 1 terms after the bar"),
    (lambda: split("e f d -> e | f d"), f"{DIMS}names 3 dims, and the shape is (6, 4)"),
    (lambda: split("(2 f) d -> | f d"), f"{DIMS}a number or dots"),
    (lambda: split("f d -> | f e"), f"{DIMS}the axis '...' once on each side"),
    (lambda: split("(f d -> | f d"), f"{DIMS}not einops notation"),
    (lambda: split("(a b) c -> | a (b c)", a=2), f"{DIMS}rows and columns within dim 0"),
    (lambda: split("i o k -> | o (i k)", shape=(2, 3, 4)), f"{DIMS}rows between dims of columns...permute"),
    (lambda: muon(split=[Split(match="*", dims="(f g) d -> g | f d", lengths={"g": 2})], offload="state"),
     'offload = "state" does not take w, whose matrices share rows'),
    (lambda: ranges((2,), (0, 5), (6, 12)), "...rows 0:5, 6:12, which are not all 12 rows once"),
    (lambda: ranges((2,), (0, 12), (0, 12)), "...which are not all 12 rows once"),
    (lambda: ranges((2,), (0, 6), (6, 13)), "...which are not all 12 rows once"),
    (lambda: ranges((2, 2), (0, 3), (0, 3), (3, 12), (3, 12)), "...not all 12 rows once"),
    (lambda: either_plan(FOUR, None, MuonOptions(buffer_gib=1 / 2**30)),
     "buffer_gib = ... is too small: ... at least ... GiB"),
    (lambda: either_plan(FOUR, None, MuonOptions(planner="rule", buffer_gib=1 / 2**30)),
     "buffer_gib = ... too small for planner = 'rule', ... set planner = 'search'"),
    # Hybrid
    (lambda: hybrid(rules=[Rule(match="nothing", optimizer="muon")]), "rules[0]: 'nothing' takes no parameter"),
    (lambda: ruled("*", "muno"), "...'muno' is unknown; did you mean 'muon'"),
    (lambda: ruled("*.up.weight", algorithm="soup"), "rules[0].options.algorithm = 'soup' is unknown"),
    (lambda: ruled("*.up.weight", lrr=1), "rules[0].options.lrr: muon has no"),
    (lambda: hybrid(rules=[ADAMW], defaults=False), "rules: no rule matches embed"),
    (lambda: hybrid(is_muon=lambda name, p: "norm" in name), "is_muon gives Muon ...norm.weight of shape (16,)"),
    (lambda: hybrid(muon={"momentum": 2.0}), "momentum = 2.0 is not accepted"),
    (lambda: hybrid(adamw={"state_dtype": "bfloat16", "betas": (0.9, 0.9999)}), "adamw.betas = [0.9, 0.9999]"),
    (lambda: hybrid(momentum=0.9), "...no keyword momentum; give options of one optimizer as muon={'momentum': ...}"),
    (lambda: hybrid(betas=(0.9, 0.9)), "...as adamw={'betas': ...}"),
    (lambda: Hybrid(Decoder().parameters()),
     "model: is a list of parameters... pass the model itself, as in Hybrid(model)"),
    # Groups of other Muons
    (lambda: from_dion(algorithm="lion"), "groups[0].algorithm = 'lion' is not here; choose 'muon' or 'adamw'"),
    (lambda: from_dion(flatten=True), "groups[0].flatten = True: describe the matrices of a convolution by muon"),
    (lambda: from_dion(adjust_lr=None), "...adjust_lr = None has no adjust_lr_fn here"),
    (lambda: from_dion(momentun=0.9), "groups[0].momentun is not a key of a group here; it takes"),
    (lambda: from_dion(params=[weight(2, 2)]), "groups[0]: a tensor of shape (2, 2) is not the model's"),
    (lambda: from_dion(use_muon=True),
     "groups: mark those of Muon by use_muon = True, as Keller Jordan's, or by algorithm"),
    (lambda: from_keller(also="embed.weight"), "groups[1]: embed.weight is in groups[0] too; give"),
    (lambda: from_keller(use_muon=None), "groups[1]: has no use_muon; set True for Muon, False for AdamW"),
    (lambda: from_keller(muon={"idle": "hold"}), "...pass expert=Expert(idle=...)"),
    (lambda: from_keller(muon={"lr": 0.1}), "...pass a key of its groups"),
    # State dicts
    (lambda: hybrid().load_state_dict({}), "state_dict: has no state and no param_groups; pass what state_dict()"),
    (lambda: hybrid().load_state_dict(torch.optim.SGD([weight()]).state_dict()),
     "...the state dict is of another optimizer"),
    (lambda: hybrid().load_state_dict(torch.optim.AdamW([{"params": weight()}, {"params": weight()}]).state_dict()),
     "...its parameters have no names; add to each of its groups the key 'param_names'"),
    (lambda: hybrid(rules=[ADAMW]).load_state_dict(hybrid().state_dict()),
     "...layers.0.up.weight: the state dict has it with muon, ... with adamw"),
    (lambda: muon(algorithm="normuon").load_state_dict(saved()), "w: the state dict has no second_moment.0"),
    (lambda: muon(state_dtype="int8").load_state_dict(saved()), "w: ... set state_dtype as it was saved"),
    (lambda: muon().load_state_dict(saved(state_dtype="int8")), "w: ... set state_dtype as it was saved"),
    (lambda: as_torch(saved(adjust_lr_fn=0.18)), "adjust_lr_fn = 0.18 is unknown to torch.optim.Muon"),
    (lambda: as_torch(saved(ns_coefficients="polar_express")), "ns_coefficients"),
    (lambda: as_torch(saved(algorithm="normuon")), "algorithm keeps second_moment"),
    (lambda: as_torch(saved(state_dtype="int8")), "...'int8' has no equivalent"),
    (lambda: as_torch(grouped(algorithm="muoneq").state_dict()), "algorithm = 'muoneq' of a group is not in torch"),
    (lambda: as_torch(hybrid().state_dict()), "...pass hybrid.optimizers['muon']"),
    (lambda: converted(TORCHS, "adam"), "source = 'adam' is not one of torch, torchtitan"),
    (lambda: converted(TORCHS, "torch"), "parameter 0: the state dict has no momentum_buffer"),
    (lambda: converted(of_dion(), "dion"), "...adjust_lr = None has no adjust_lr_fn here; pass adjust_lr_fn="),
    # AdamW, clipping, schedulers, machines
    (lambda: AdamW([weight(2)], state_dtype="bfloat16", betas=(0.9, 0.999)),
     "betas = [0.9, 0.999] are not accepted with state_dtype"),
    (lambda: AdamW([{"params": [weight(2)], "amsgrad": True}]), "amsgrad = True is not accepted"),
    (lambda: muon(offload="parameters").reload(), "reload: the parameters are on the host"),
    (lambda: clip_grad_norm_([weight()], 1.0, 0), "norm_type = 0"),
    (lambda: cycling(lambda made: lr_scheduler.OneCycleLR(made, 0.02, total_steps=9)), CYCLE),
    (lambda: planning_machine(Machine(file="x.json"), "cuda", "[]"), "machine.file = 'x.json' is not a machine"),
    (lambda: planning_machine(Machine(file="x.json"), "cuda", '{"machine": {"flops": {}}}'), "...is not a machine"),
    (lambda: planning_machine(Machine(file="x.json"), "cuda", '{"source": "rehearsed", "flops": {}}'),
     "machine.file = 'x.json' ...it was rehearsed without a GPU"),
    # QK-clip and heads
    (lambda: QKClip([], threshold=0.0), "threshold = 0.0 must be more than 0"),
    (lambda: QKClip([AttentionLayer("a", 2), AttentionLayer("a", 2)]), "a: given twice"),
    (lambda: attention(2, thresholds=(1.0, 0.0)), "a: thresholds must be 2 numbers above 0"),
    (lambda: attention(3, CLIPPED), "wq: 8 rows are not repeats of 4 rows for 3 heads"),
    (lambda: attention(2, ONE_HEAD), "w: the pattern has more than the 1 heads"),
    (lambda: attention(2).observe("b", torch.ones(2)), "'b' is none of the layers: a"),
    (lambda: attention(2).observe("a", torch.ones(3)), "a: has 2 heads, and not 3 from 0 on"),
    (lambda: head_splits(nn.Linear(4, 4)), "...no attention with head_dim ... dims='(n h) d -> n | h d'"),
]
"""The call, and the text with which its error begins."""

SKIPPED = "w: the gradient was not finite, and the step changed nothing on any rank"
CONV = {"conv1d.weight": nn.Conv1d(32, 32, 31).weight, "conv": nn.Conv1d(64, 64, 3).weight}
WARNINGS: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: Muon([("embed_tokens.weight", weight(32, 32)), ("layers.0.w", weight(32, 4))]),
     ["embed_tokens.weight: ...embedding", "layers.*.w (32x4): a side under 16"]),
    (lambda: Muon([("conv", CONV["conv"])]), ["conv (64x64x3): a side under 16", "conv: taken as a stack"]),
    (lambda: Muon([("conv", CONV["conv"])], split=[Split(match="conv", dims="o i k -> | o (i k)")]), []),
    (lambda: Muon([("conv1d.weight", CONV["conv1d.weight"])]),
     ["conv1d.weight: taken as a stack ... dims = 'f b1 d -> | f (b1 d)'"]),
    (lambda: Hybrid(nn.ModuleDict({"conv": nn.Conv1d(32, 32, 31)}), rules=[Rule(match="*.weight", optimizer="muon")]),
     ["conv.weight: taken as a stack"]),
    (lambda: Hybrid(nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 8, False), nn.Linear(8, 32, False))),
     ["1.weight (8x32)...: a side under 16"]),
    (lambda: not_finite(clip=False), [SKIPPED, SKIPPED]),
    (lambda: not_finite(clip=True), ["the norm of the gradients was not finite", SKIPPED, SKIPPED]),
]
# fmt: on
"""The call, and the text with which each of its warnings begins."""


@pytest.fixture(autouse=True)
def _another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two registered algorithms; no interpreter of Triton."""
    monkeypatch.setitem(registry.algorithms._values, "mine", WithOptions)
    monkeypatch.setitem(registry.algorithms._values, "refusing", Refusing)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def begins(said: str, text: str) -> bool:
    return re.match(re.escape(text).replace(re.escape("..."), ".*"), said, re.DOTALL) is not None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("call", "text"), REFUSALS, ids=[text.strip(".")[:50] for _, text in REFUSALS])
def test_a_wrong_call_is_refused_with_the_problem_and_the_remedy(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    assert begins(str(refused.value), text), refused.value
    if isinstance(refused.value, OptionError):
        assert str(refused.value).startswith(refused.value.option)


@pytest.mark.parametrize(("call", "texts"), WARNINGS, ids=[" and ".join(texts)[:50] or "none" for _, texts in WARNINGS])
def test_a_doubtful_call_warns_of_each_doubt_at_the_users_line(call: Callable[[], object], texts: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    said = [str(warning.message) for warning in caught]
    assert [begins(*pair) for pair in zip(said, texts, strict=True)] == [True] * len(texts), said
    assert {warning.filename for warning in caught} <= {__file__}
