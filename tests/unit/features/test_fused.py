"""muon.expert.fused: kernels that read and write each tensor once compute what the foreach operators do.

Kernels run under Triton's interpreter, which rounds products before sums: bits are those of separate operators.
"""

import importlib.util
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.accuracy import relative_error
from tests.dist.harness import run_ranks
from tests.shared import muon_keywords
from titan_muon import Expert, Muon
from titan_muon.engine.faults.skip import Scaling
from titan_muon.engine.step.context import StepContext
from titan_muon.engine.step.muon import Tensors
from titan_muon.engine.step.rounding import chunk_of, draw_key, memory_bytes, seed_of
from titan_muon.kernels import fused
from titan_muon.kernels.fused import BLOCK, Table, momentum_launch, rows_of, update_launch
from titan_muon.kernels.measured import Choices
from titan_muon.options import MuonOptions

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: make kernels")

SHAPES, ALIGNED = ((5, 7), (1, 1), (0, 6), (33, 80), (1, BLOCK + 3)), ((48, 64),)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda stored: stored,
    "columns of a wider tensor": lambda stored: torch.cat([stored, stored], 1)[:, : stored.size(1)],
    "interleaved rows": lambda stored: stored.repeat_interleave(2, 0)[::2],
    "interleaved columns": lambda stored: stored.repeat_interleave(3, 1)[:, ::3],
    "transposed": lambda stored: stored.t().contiguous().t(),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def tensors(seed: int, dtype: torch.dtype, layout: str = "contiguous", aligned: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ALIGNED if aligned else SHAPES
    return [LAYOUTS[layout](torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    change = end - start
    return start + change * weight if weight < 0.5 else end - change * (1 - weight)


def table(lists: list[list[Tensor]], firsts: list[int] | None = None) -> Table:
    return Table.of(rows_of(lists, firsts or [0] * len(lists[0])))


@pytest.mark.parametrize(
    ("is_faster", "rule", "dtype", "expected"),
    [
        (True, "muon", FLOAT32, True),
        (False, "muon", FLOAT32, False),
        (True, "muonh", FLOAT32, False),
        (True, "muon", torch.float64, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_measured_as_faster_and_run(
    is_faster: bool, rule: str, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "measured_choices", lambda device: Choices(fused=is_faster))
    monkeypatch.setattr(fused, "usable", lambda device: True)
    options = MuonOptions(fused="auto", algorithm=rule)
    assert fused.with_fused(options, torch.device("cpu"), [torch.zeros(2, 2, dtype=dtype)]).fused is expected


def test_auto_without_a_measurement_takes_the_foreach_operators() -> None:
    muon = Muon([("w", nn.Parameter(torch.ones(4, 6)))], expert=Expert(fused="auto")).build()
    assert muon.options.fused is False


@needs_interpreter
@every_layout
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("state", "grad", "wire"),
    [
        (FLOAT32, FLOAT32, BFLOAT16),
        (FLOAT32, BFLOAT16, FLOAT32),
        (BFLOAT16, BFLOAT16, BFLOAT16),
        (FLOAT32, FLOAT16, BFLOAT16),
    ],
    ids=str,
)
def test_the_momentum_has_the_bits_of_float32_operators(
    state: torch.dtype, grad: torch.dtype, wire: torch.dtype, nesterov: bool, aligned: bool, layout: str
) -> None:
    averages, grads = tensors(0, state, layout, aligned), tensors(1, grad, layout, aligned)
    packed = tensors(2, wire, aligned=aligned)
    before = [average.clone() for average in averages]
    advanced = [lerp(a.float(), g.float(), 0.05) for a, g in zip(averages, grads, strict=True)]
    pairs = list(zip(grads, advanced, strict=True))
    blends = [lerp(g.float(), a, 0.95) if nesterov else a for g, a in pairs]
    lists = [averages, grads, packed]
    momentum_launch(table(lists), lists, 0.95, None, nesterov=nesterov).run()
    assert all(torch.equal(p, b.to(wire)) for p, b in zip(packed, blends, strict=True))
    assert all(torch.equal(a, b.to(state)) for a, b in zip(averages, advanced, strict=True))
    torch._foreach_copy_(averages, before)
    momentum_launch(table([averages, grads, averages]), [averages, grads], 0.95, None, nesterov=nesterov).run()
    assert all(torch.equal(a, b.to(state)) for a, b in zip(averages, advanced, strict=True)), "without packing"


@needs_interpreter
@every_layout
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("dtype", "wire"), [(FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, BFLOAT16)], ids=str
)
def test_an_update_is_rounded_once(
    dtype: torch.dtype, wire: torch.dtype, in_memory: bool, cautious: bool, layout: str
) -> None:
    params, updates = tensors(0, dtype, layout), tensors(1, wire)
    factor, rate = torch.tensor(-0.002 if cautious else 0.998), torch.tensor(-0.02)
    wide = [
        decayed(p.float(), u.float(), factor, cautious) + u.float() * rate for p, u in zip(params, updates, strict=True)
    ]
    numbers = (factor, rate) if in_memory else (factor.item(), rate.item())
    update_launch(table([params, updates]), [params, updates], *numbers, None, None, cautious=cautious).run()
    assert all(torch.equal(p, w.to(dtype)) for p, w in zip(params, wide, strict=True))


def decayed(param: Tensor, update: Tensor, factor: Tensor, cautious: bool) -> Tensor:
    return torch.where(param * update < 0, param, param + param * factor) if cautious else param * factor


@needs_interpreter
@every_layout
@pytest.mark.parametrize("cautious", [True, False])
def test_stochastic_rounding_has_the_draws_of_the_foreach_operators(cautious: bool, layout: str) -> None:
    params, updates = tensors(0, BFLOAT16, layout), tensors(1, FLOAT32)
    # All bits set, as CUDA writes it; infinities; and a weight that a draw moves to infinity.
    params[3][0, :4] = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(BFLOAT16).max])
    updates[3][1, 0] = torch.tensor(-1, dtype=torch.int32).view(FLOAT32)
    firsts = [draw_key("w", index) + 2**31 * (index % 2) for index in range(len(params))]
    factor, rate = torch.tensor(-0.002 if cautious else 0.998), torch.tensor(-0.02)
    expected = [param.clone() for param in params]
    scratch = torch.empty(sum(map(memory_bytes, params)), dtype=torch.uint8)
    chunk = chunk_of([param.shape for param in params], firsts, scratch)
    assert [number % 2**32 for number in chunk.firsts] == [first % 2**32 for first in firsts]

    def apply(wide: Tensors, added: Tensors) -> None:
        for param, update in zip(wide, added, strict=True):
            param.copy_(decayed(param, update, factor, cautious) + update * rate)

    for step in (0, 15, 16):
        chunk.update(expected, updates, apply, step)
        numbers = (factor.item(), rate.item(), seed_of(step))
        update_launch(
            table([params, updates], chunk.firsts), [params, updates], *numbers, None, cautious=cautious
        ).run()
        for param, bits in zip(params, expected, strict=True):
            assert torch.equal(param.nan_to_num(-1.0), bits.nan_to_num(-1.0))
    # Cautious decay subtracts infinity.
    assert cautious or params[3][0, :2].tolist() == [math.inf, -math.inf]
    assert params[3][0, 2].isnan()
    assert params[3][1, 0].isnan()


@needs_interpreter
@pytest.mark.parametrize("skipped", [True, False])
def test_a_skipped_step_changes_nothing_and_a_scale_is_removed(skipped: bool) -> None:
    averages, grads, packed = tensors(0, FLOAT32), tensors(1, FLOAT32), tensors(2, FLOAT32)
    params, updates = tensors(3, BFLOAT16), tensors(4, BFLOAT16)
    before = [tensor.clone() for tensor in (*averages, *params)]
    scaling = Scaling(torch.tensor(skipped), torch.tensor(0.25))
    expected = before[: len(averages)]
    if skipped:
        grads[0][0, 0] = math.nan
    else:
        expected = [lerp(a, g * 0.25, 0.05) for a, g in zip(averages, grads, strict=True)]
    lists = [averages, grads, packed]
    momentum_launch(table(lists), lists, 0.95, scaling, nesterov=False).run()
    update_launch(table([params, updates]), [params, updates], 0.5, -1.0, 3, scaling, cautious=False).run()
    assert all(map(torch.equal, averages, expected))
    assert all(map(torch.equal, packed, expected))
    changed = [not torch.equal(p, b) for p, b in zip(params, before[len(averages) :], strict=True) if p.numel()]
    assert changed == [not skipped] * len(changed)


STEPS = 3
MODEL = {"wide": (24, 40), "tall": (33, 20), "experts": (3, 16, 32)}


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in MODEL.items()}


def trained(dtype: torch.dtype, change: Callable[[Muon, int], None] | None = None, **options: Any) -> list[Tensor]:
    """Weights and momentum after some steps."""
    params = {name: nn.Parameter(value) for name, value in drawn(0, dtype).items()}
    muon = Muon(list(params.items()), **muon_keywords(**{"lr": 0.02, "orthogonalize": "reference", **options}))
    for step in range(STEPS):
        for name, grad in drawn(step + 1, dtype).items():
            params[name].grad = grad
        if change is not None:
            change(muon, step)
        muon.step()
    muon.check_last_step()
    return [tensor.detach() for p in params.values() for tensor in (p, muon.state[p]["momentum_buffer"])]


def with_scale(muon: Muon, step: int) -> None:
    """As torch.amp.GradScaler, with an overflow in the second step."""
    for group in muon.param_groups:
        for param in group["params"]:
            param.grad.mul_(8)
    muon.grad_scale, muon.found_inf = torch.tensor(8.0), torch.tensor(float(step == 1))


def with_highest_rate(muon: Muon, step: int) -> None:
    for group in muon.param_groups:
        group["max_lr"] = 0.03


def without_gradient(muon: Muon, step: int) -> None:
    if step == 1:
        muon.param_groups[0]["params"][0].grad = None


@needs_interpreter
@pytest.mark.parametrize(
    ("dtype", "options", "change"),
    [
        (FLOAT32, {}, None),
        (FLOAT32, {"nesterov": False, "adjust_lr_fn": "original", "lr": 0.01}, None),
        (FLOAT32, {"cautious": True, "decay_follows_lr": True}, with_highest_rate),
        (FLOAT32, {"lr": torch.tensor(0.02)}, None),
        (FLOAT32, {"momentum_warmup_steps": 2, "algorithm": "normuon"}, None),
        (FLOAT32, {"state_dtype": "int8"}, None),
        (FLOAT32, {"offload": "state"}, None),
        (FLOAT32, {"offload": "parameters"}, None),
        (FLOAT32, {"idle": "hold"}, None),
        (FLOAT32, {"on_bad_gradient": "skip_missing"}, without_gradient),
        (FLOAT32, {}, with_scale),
        (BFLOAT16, {"wire_dtype": "float32"}, None),
        (BFLOAT16, {"state_dtype": "bfloat16", "cautious": True}, None),
        (BFLOAT16, {}, with_scale),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_training_is_that_of_the_foreach_operators(
    dtype: torch.dtype, options: dict[str, Any], change: Callable[[Muon, int], None] | None
) -> None:
    foreach = trained(dtype, change, **options)
    # Newton-Schulz in bfloat16 enlarges a difference of one bit.
    tolerance = 1e-4 if dtype == FLOAT32 else 3e-3
    for ours, theirs in zip(trained(dtype, change, fused=True, **options), foreach, strict=True):
        assert relative_error(ours.float(), theirs.float()).max() <= tolerance


@needs_interpreter
def test_a_call_is_a_launch_and_a_table_is_sent_only_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, launches = Counter[int](), Counter[int]()
    on_device, now = StepContext.on_device, 0

    def counted(rank: StepContext, tensor: Tensor) -> Tensor:
        sent[now] += tensor.dtype == torch.int64
        return on_device(rank, tensor)

    param = nn.Parameter(torch.randn(64, 48))
    params = {"a": param, **{f"b{index}": nn.Parameter(torch.randn(16, 16)) for index in range(5)}}
    muon = Muon(list(params.items()), expert=Expert(fused=True, keep_buffers=True)).build()
    for tensor in params.values():
        tensor.grad = torch.randn(tensor.shape)
    monkeypatch.setattr(StepContext, "on_device", counted)
    for name in ("momentum_launch", "update_launch"):
        make = getattr(fused, name)

        def launched(*args: Any, make: Any = make, **kept: Any) -> Any:
            launches[now] += 1
            return make(*args, **kept)

        monkeypatch.setattr(fused, name, launched)
    for now in range(3):
        if now == 2:
            param.grad = param.grad.clone()
        muon.step()
    views = muon.engine.step.views
    calls = sum(len(of.gathers) + len(of.updates) for of in views)
    assert calls < 2 * len(params), "calls of several tensors"
    assert launches == dict.fromkeys(range(3), calls)
    assert sent == Counter({0: calls, 2: 1}), "the call with the moved gradient"
    assert len(muon.engine.step.hooks[0]._tables) == calls, "tables of earlier gradients are dropped"


def sharded(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Whole weights after some steps, by placement."""
    mesh, results = init_device_mesh("cpu", (world_size,)), {}
    for name, dim in (("rows", 0), ("columns", 1)):
        values = {key: value for key, value in drawn(0, dtype).items() if value.ndim == 2}
        params = {k: nn.Parameter(distribute_tensor(v, mesh, [Shard(dim)])) for k, v in values.items()}
        muon = Muon(list(params.items()), **muon_keywords(lr=0.02, orthogonalize="reference", fused=True))
        for step in range(STEPS):
            grads = {k: distribute_tensor(drawn(step + 1, dtype)[k], mesh, [Shard(dim)]) for k in params}
            # Backward accumulates the gradients.
            sum((param.float() * grads[k].float()).sum() for k, param in params.items()).backward()
            muon.step()
            muon.zero_grad()
        muon.check_last_step()
        results[name] = [param.full_tensor().detach() for param in params.values()]
    return results


@needs_interpreter
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_shards_get_the_bits_of_one_process(dtype: torch.dtype) -> None:
    whole = trained(dtype, fused=True)[:4:2]
    for results in run_ranks(sharded, 2, dtype):
        for name, weights in results.items():
            # Columns have other draws, see [Note: draws].
            if dtype == FLOAT32 or name != "columns":
                assert all(map(torch.equal, weights, whole)), name


def test_a_table_has_each_element_once_and_hints_that_hold() -> None:
    odd, even = torch.empty(5, 7), torch.empty(48, 3 * BLOCK)
    aligned = Table.of(rows_of([[even], [even.bfloat16()]], [-1]))
    assert (aligned.flat, aligned.aligned) == (True, True)
    assert aligned.tensors[0, :3].tolist() == [even.numel(), 3 * BLOCK, -1]
    assert aligned.tensors[0, 3:6].tolist() == [even.data_ptr(), 3 * BLOCK, 1]
    empty = torch.empty(0, 7)
    tiles = Table.of(rows_of([[odd, empty, even]], [0, 0, 0])).tiles
    assert tiles.tolist() == [[0, 0], *([2, number] for number in range(48 * 3))]
    wide = torch.empty(16, 96)
    hints = [
        (odd, True, False),
        (wide, True, True),
        (wide[:, :32], False, True),
        (wide[:, 1:33], False, False),
        (wide.flatten()[1:65].view(2, 32), True, False),
        (wide[:, ::3], False, False),
        (torch.empty(96, 16).t(), False, False),
    ]
    for view, flat, is_aligned in hints:
        made = Table.of(rows_of([[view], [torch.empty(view.shape)]], [0]))
        assert (made.flat, made.aligned) == (flat, is_aligned), view.stride()


def test_wider_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "usable", lambda device: True)
    with pytest.raises(ValueError, match="fused = True computes in float32, and these parameters are wider: w; set"):
        Muon([("w", nn.Parameter(torch.ones(16, 16, dtype=torch.float64)))], expert=Expert(fused=True)).build()


def test_the_interpreter_does_not_read_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: True)
    for interpreted, device in (("1", "cpu"), ("0", "cuda")):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        usable = {name for name in ("cpu", "cuda", "mps") if fused.usable(name)}
        assert usable == {device}
