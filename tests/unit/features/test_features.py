"""Features by themselves: states on the host, momentum in 8 bits, the mask, a GradScaler; a disabled one is absent."""

from __future__ import annotations

import ast
import copy
import importlib.util
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import titan_muon
from tests.dist.harness import run_program
from tests.shared import equal, muon_keywords
from tests.stream_order import StreamOrder
from tests.unit.features.test_fused import needs_interpreter
from tests.unit.step.test_first_use import set_gradients, train
from titan_muon import Expert, Muon, clip_grad_norm_, selection
from titan_muon import adamw as batched
from titan_muon.engine.step.foreach import SLOT_ALIGNMENT
from titan_muon.features.eight_bit import SCALE_BLOCK, decoded, encode
from titan_muon.features.offload import TRANSFERS_AT_ONCE, Copied, Window

SHAPES = {"square": (16, 20), "wide": (4, 12), "tall": (12, 4), "experts": (3, 4, 6), "more": (5, 7)}
CPU = torch.device("cpu")


def opened(count: int = 5) -> tuple[Window, list[list[Copied]]]:
    """A window, and transfers of two changed tensors, with an odd number of bytes, and an unchanged tensor."""
    window = Window(CPU)
    hosts = [
        [torch.full((3, 3), float(i), dtype=torch.bfloat16), torch.full((4 + i,), float(i)), torch.full((3,), float(i))]
        for i in range(count)
    ]
    slots, on_device = window.slots(hosts)
    assert [slot.nbytes for slot in slots] == [3 * SLOT_ALIGNMENT] * TRANSFERS_AT_ONCE, "as large as the largest"
    return window, [list(map(Copied, *pair, (True, True, False))) for pair in zip(on_device, hosts, strict=True)]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Transfers from now on, in order."""
    log: list[str] = []
    fetch, fetched = Window._fetch, Window.fetched

    def fetches(self: Window, number: int) -> None:
        fetch(self, number)
        log.append(f"{number} comes")
        assert len(self._arrived) <= TRANSFERS_AT_ONCE

    @contextmanager
    def uses(self: Window) -> Iterator[None]:
        log.append(f"{self._used} is used")
        with fetched(self):
            yield
            log.append(f"{self._used} goes")

    monkeypatch.setattr(Window, "_fetch", fetches)
    monkeypatch.setattr(Window, "fetched", uses)
    return log


def test_a_load_overlaps_the_previous_load_with_at_most_two_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log, (window, transfers) = watched(monkeypatch), opened()
    window.begin(transfers)
    for number, transfer in enumerate(transfers):
        with window.fetched():
            for on_device, host, _ in transfer:
                assert torch.equal(on_device, torch.full_like(host, float(number)))
                on_device.add_(100)
            assert all((copied.host == number).all() for copied in transfer), "not in place on the host"
        for _, host, changes in transfer:
            assert (host == (100 + number if changes else number)).all(), "only changed tensors go back"
    window.end()
    begin = ["0 comes", "1 comes", "0 is used", "0 goes", "2 comes", "1 is used", "1 goes", "3 comes", "2 is used"]
    assert log[: len(begin)] == begin
    assert window._transfers == (), "between steps their memory is free"


@pytest.mark.parametrize(
    ("stream", "method"), [("_arriving", "wait_stream"), ("_leaving", "wait_stream"), ("current", "wait_event")]
)
def test_every_wait_of_a_step_is_necessary(stream: str, method: str, stream_order: StreamOrder) -> None:
    with stream_order:
        muon, _ = stepped("parameters", buffer_gib=1 / 2**30)
        copies = {stream for stream, name in stream_order.log if name == "aten::copy_"}
        assert len(copies - {stream_order.compute}) == 2
        offload = muon.engine.offload
        waiting = stream_order.compute if stream == "current" else getattr(offload.window, stream)
        setattr(waiting, method, lambda other: None)
        with pytest.raises(AssertionError, match="does not wait for"):
            muon.step()


def test_a_failed_step_leaves_the_next_step_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    window, transfers = opened()
    window.begin(transfers)
    with suppress(RuntimeError), window.fetched():
        transfers[0][0].on_device.add_(1)
        raise RuntimeError
    window.begin(transfers)
    for transfer in transfers:
        with window.fetched():
            for copied in transfer:
                copied.on_device.mul_(2)
    window.end()
    assert all((c.host == (2 * i if c.changes else i)).all() for i, transfer in enumerate(transfers) for c in transfer)


def named(seed: int = 0) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def averages(optimizer: Any) -> list[Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


@pytest.mark.parametrize("offload", ["none", "state", "parameters"])
@pytest.mark.parametrize(("foreach", "fused"), [(False, False), (True, False), (False, True)])
def test_adamw_has_the_bits_of_torchs_adamw(foreach: bool, fused: bool, offload: str) -> None:
    options = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": foreach, "fused": fused}
    theirs, ours = named(), named()
    expected = torch.optim.AdamW(theirs.items(), **options)
    adamw = batched.AdamW(ours.items(), offload=offload, **options)
    for optimizer, params in ((expected, theirs), (adamw, ours)):
        train(optimizer, params, range(4))
    assert equal(theirs.values(), ours.values())
    for left, right in zip(expected.state.values(), adamw.state.values(), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)
    adamw.load_state_dict(expected.state_dict())
    expected.load_state_dict(adamw.state_dict())


@pytest.mark.parametrize("kind", [batched.AdamW, Muon])
def test_states_move_between_steps(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, params, others = watched(monkeypatch), named(), named()
    plain, moved = (kind(p.items(), lr=0.02) for p in (params, others))
    for optimizer, trained in ((plain, params), (moved, others)):
        train(optimizer, trained, range(1))
    for move, loads in (("offload", 1), ("reload", 0)):
        before = averages(moved)
        getattr(moved, move)()
        assert all(a is not b and torch.equal(a, b) for a, b in zip(before, averages(moved), strict=True))
        log.clear()
        for optimizer, trained in ((plain, params), (moved, others)):
            train(optimizer, trained, range(1, 3))
        assert log.count("0 comes") == 2 * loads * (kind is Muon)
        assert equal(params.values(), others.values())


@pytest.mark.parametrize("kind", [batched.AdamW, Muon])
def test_readers_of_host_states_get_current_values(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(Window, "synchronize", lambda window: waits.append(window))
    monkeypatch.setattr(batched.AdamW, "synchronize", lambda adamw: waits.append(adamw))
    for offload, of_a_step in (("state", 0), ("parameters", 1)):
        params = named()
        optimizer = kind(params.items(), offload=offload)
        train(optimizer, params, range(1))
        waits.clear()
        train(optimizer, params, range(1, 2))
        assert len(waits) == of_a_step, "parameters are read without a word to the optimizer"
        saved = optimizer.state_dict()
        assert len(waits) == of_a_step + 1
        optimizer.load_state_dict(saved)
        assert len(waits) > of_a_step + 1, "what is still on its way would overwrite what was loaded"


@pytest.mark.parametrize("to", ["none", "state"])
def test_state_dicts_load_with_states_on_host_or_device(to: str) -> None:
    first, second = named(), named()
    saving = batched.AdamW(first.items(), fused=True, offload="state" if to == "none" else "none")
    loading = batched.AdamW(second.items(), fused=True, offload=to)
    train(saving, first, range(2))
    train(loading, second, range(7, 9))
    state = copy.deepcopy(saving.state_dict())
    places = [tensor.data_ptr() for tensor in averages(loading)]
    loading.load_state_dict(state)
    assert [tensor.data_ptr() for tensor in averages(loading)] == places, "loaded in place"
    with torch.no_grad():
        for param, other in zip(second.values(), first.values(), strict=True):
            param.copy_(other)
    for optimizer, params in ((saving, first), (loading, second)):
        train(optimizer, params, range(2, 4))
    assert equal(first.values(), second.values())


def test_bfloat16_averages_are_computed_in_float32_and_rounded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "BATCH_BYTES", 600)
    wide, ours, offloaded = named(), named(), named()
    options = {"lr": 0.02, "betas": (0.9, 0.95), "foreach": False}
    reference = torch.optim.AdamW(wide.items(), **options)
    adamw = batched.AdamW(ours.items(), state_dtype="bfloat16", **options)
    third = batched.AdamW(offloaded.items(), state_dtype="bfloat16", offload="state", **options)
    for step in range(4):
        for optimizer, params in ((reference, wide), (adamw, ours), (third, offloaded)):
            train(optimizer, params, range(step, step + 1))
        for state in reference.state.values():
            for name in batched.AVERAGES:
                state[name].copy_(state[name].bfloat16())
    assert {average.dtype for average in averages(adamw)} == {torch.bfloat16}
    assert equal((*wide.values(), *wide.values()), (*ours.values(), *offloaded.values()))


def test_a_second_moment_in_bfloat16_shrinks_with_the_largest_beta_and_never_with_a_refused_one() -> None:
    for beta, shrinks in ((0.999, False), (batched.SLOWEST_IN_BFLOAT16, True)):
        values = torch.linspace(1, 2, 129)[:-1].bfloat16()
        assert bool(((values.float() * beta).bfloat16() < values).all()) == shrinks


def stepped(offload: str, missing: str = "", **options: Any) -> tuple[Muon, list[Tensor]]:
    """A Muon after three steps, and its weights, momentum and gradients."""
    params = {name: param for name, param in named().items() if name in ("square", "experts")}
    muon = Muon(list(params.items()), **muon_keywords(lr=0.1, orthogonalize="reference", offload=offload, **options))
    for step in range(3):
        set_gradients(params, step)
        if missing:
            params[missing].grad = None
        muon.step()
    grads = [param.grad for param in params.values() if param.grad is not None]
    return muon, [*(param.detach() for param in params.values()), *averages(muon), *grads]


@pytest.mark.parametrize("offload", ["state", "parameters"])
@pytest.mark.parametrize("missing", ["square", "experts"])
def test_parameters_without_a_gradient_and_gradients_keep_their_values_on_the_host(offload: str, missing: str) -> None:
    kept, expected = (stepped(place, missing, on_bad_gradient="skip_missing") for place in (offload, "none"))
    assert equal(kept[1], expected[1])
    slots = [tensor for views in kept[0].engine.step.views for call in views.gathers for tensor in call.momentum]
    assert {slot.untyped_storage().nbytes() for slot in slots} == {0}, "no memory between steps"


# Momentum in 8 bits


def encoded(momentum: Tensor, step: int = 0, key: int = 7) -> tuple[Tensor, Tensor]:
    rows, cols = momentum.shape
    wide = torch.zeros(rows, -(-cols // SCALE_BLOCK) * SCALE_BLOCK)
    wide[:, :cols] = momentum
    numbers, scales = torch.zeros(rows, cols, dtype=torch.int8), torch.zeros(rows, -(-cols // SCALE_BLOCK))
    encode(wide[:, :cols], numbers, scales, key, step)
    return numbers, scales


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cols", [1, 63, 64, 65, 200])
def test_the_error_of_an_element_is_below_the_scale_of_the_block(cols: int) -> None:
    momentum = drawn(5, cols) * torch.logspace(-8, 3, 5)[:, None]
    numbers, scales = encoded(momentum)
    error = (decoded(numbers, scales) - momentum).abs()
    assert (error <= scales.repeat_interleave(SCALE_BLOCK, 1)[:, :cols]).all()
    assert numbers.abs().amax() == 127


def test_rounding_keeps_the_mean() -> None:
    """Rounding to nearest would lose a change of a tenth of a unit for ever."""
    momentum = torch.full((1, 64), 0.1)
    momentum[0, 0] = 127.0
    draws = torch.stack([decoded(*encoded(momentum, step)) for step in range(2000)])[:, 0, 1:]
    assert abs(draws.mean().item() - 0.1) < 0.01
    assert set(draws.unique().tolist()) == {0.0, 1.0}


def test_a_decoded_momentum_encodes_to_the_same_numbers_for_every_draw() -> None:
    numbers, scales = encoded(drawn(8, 130))
    for step in range(20):
        again, new_scales = encoded(decoded(numbers, scales), step)
        assert torch.equal(again, numbers)
        torch.testing.assert_close(new_scales, scales, rtol=1e-6, atol=0)


def test_nonfinite_elements_become_zero_without_effect_on_the_block() -> None:
    momentum = drawn(2, 64)
    momentum[0, 3], momentum[1, 5] = math.nan, math.inf
    numbers, scales = encoded(momentum)
    assert numbers[0, 3] == numbers[1, 5] == 0
    assert scales.isfinite().all()
    assert (scales < 1).all()


def test_each_step_rounds_the_momentum_by_its_own_draws() -> None:
    param, numbers = nn.Parameter(drawn(16, 96)), []
    muon = Muon([("w", param)], momentum=0.0, state_dtype="int8")
    for _ in range(2):
        param.grad = drawn(16, 96, seed=1)
        muon.step()
        numbers.append(muon.state[param]["momentum_buffer"].clone())
    assert not torch.equal(*numbers)


# The mask of matrices without an update, in float64. Bits: tests/parity


def test_float64_trains_with_a_mask_and_a_clip() -> None:
    param = nn.Parameter(torch.randn(16, 24, dtype=torch.float64))
    muon, before = Muon([("w", param)], expert=Expert(idle="hold")), param.detach().clone()
    param.grad = torch.full_like(param, 1e3)
    assert clip_grad_norm_([param], 1.0) == pytest.approx(1e3 * (16 * 24) ** 0.5)
    muon.step()
    muon.check_last_step()
    assert not torch.equal(param, before)


COUNTED: dict[str, Callable[[Muon], list[dict[str, int]]]] = {
    "saved": lambda muon: muon.state_dict()["param_groups"],
    "copied": lambda muon: copy.deepcopy(muon).param_groups,
    "checked": lambda muon: muon.check_last_step() or muon.param_groups,
}


@pytest.mark.parametrize("how", COUNTED)
def test_a_skipped_step_is_not_counted(how: str) -> None:
    """The count moves the warm-up of the momentum and the draws of rounding."""
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], momentum_warmup_steps=4)
    for skipped in ([False, True, True, False, True], [False]):
        for skips in skipped:
            param.grad = torch.randn(6, 8)
            muon.found_inf = torch.tensor(float(skips))
            muon.step()
        assert [group["step"] for group in COUNTED[how](muon)] == [2 if any(skipped) else 3]


# A disabled feature is absent: no import of the file, and no call in a step

PACKAGE = Path(titan_muon.__file__).parent
FEATURES = sorted(
    f"features.{path.stem}" for path in (PACKAGE / "features").glob("*.py") if path.stem not in ("__init__", "private")
)
KERNELS = tuple(f"kernels.{name}" for name in ("batches", "fused", "passes", "tables"))
FILES = [*FEATURES, *KERNELS, "kernels.graph"]
OTHERS = ("planner", "features", "kernels", "forecast", "plugins", "owned", "trainer", "audit", "assignment")

STEPS = """
import sys
sys.modules.update(dict.fromkeys({removed!r}))
import torch
from torch import nn
from titan_muon import Expert, Muon

print([name for name, module in sys.modules.items() if module and name.startswith({others!r})])
params = {{name: nn.Parameter(torch.ones(6, 8)) for name in ("a", "b")}}
optimizer = Muon(list(params.items()), {options})
optimizer.found_inf = {found_inf}
for step in range(2):
    for parameter in params.values():
        parameter.grad = torch.randn(6, 8)
    optimizer.step()
assert optimizer.orthogonalized == 2
print(sorted(name for name in {files!r} if sys.modules.get("titan_muon." + name) is not None))
"""


def program(kept: tuple[str, ...], options: str, found_inf: str = "None") -> str:
    """Two steps while the files of all features but `kept` are removed."""
    removed, others = ([f"titan_muon.{name}" for name in names] for names in (FILES, OTHERS))
    removed = [name for name in removed if name.removeprefix("titan_muon.") not in kept]
    return STEPS.format(removed=removed, options=options, found_inf=found_inf, files=FILES, others=tuple(others))


@pytest.mark.parametrize(
    ("kept", "options", "found_inf"),
    [
        ((), "", "None"),
        (("features.offload",), "offload='state'", "None"),
        (("features.forward",), "overlap='forward'", "None"),
        (("features.eight_bit",), "state_dtype='int8'", "None"),
        (("features.owner_state",), "state='owner'", "None"),
        ((), "", "torch.zeros(())"),
        ((), "expert=Expert(on_bad_gradient='skip_step')", "None"),
        ((), "expert=Expert(on_bad_gradient='skip_missing')", "None"),
        (("features.mask",), "expert=Expert(idle='hold')", "None"),
        (("features.weight_norms",), "algorithm='muonh', weight_decay=0.0", "None"),
        pytest.param(KERNELS, "expert=Expert(fused=True)", "None", marks=needs_interpreter),
    ],
    ids=str,
)
def test_a_step_loads_only_the_files_of_its_features(kept: tuple[str, ...], options: str, found_inf: str) -> None:
    status, shown = run_program("-c", program(kept, options, found_inf))
    assert status == 0, shown
    assert shown.splitlines()[-1] == str(sorted(kept))


def test_the_import_of_muon_loads_no_other_part_and_a_plan_by_the_rule_needs_no_planner() -> None:
    # A process of its own, because the harness has imported the package.
    code = "import sys; sys.modules['titan_muon.planner'] = None" + program((), "expert=Expert(planner='rule')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


@pytest.mark.parametrize("choice", ["skip_step", "skip_missing", "hold", "int8", "forward"])
def test_the_step_does_not_ask_for_the_option_of_a_feature(choice: str) -> None:
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "engine/step").glob("*.py")]
    values = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert choice not in values


@pytest.mark.parametrize("name", FEATURES)
def test_no_feature_imports_a_second_feature(name: str) -> None:
    source = (PACKAGE / f"{name.replace('.', '/')}.py").read_text()
    imported = {
        f"features.{node.module.split('.')[0]}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }
    assert imported.isdisjoint(FEATURES)


TORCHS = """
import torch
import titan_muon
from torch import nn
from titan_muon import Expert, Muon

assert titan_muon.__file__.startswith({folder!r}), titan_muon.__file__
weights = [[nn.Parameter(torch.ones(16, 24)), nn.Parameter(torch.ones(24, 16))] for _ in range(2)]
ours = Muon(zip("ab", weights[0]), adjust_lr_fn='original', weight_decay=0.1, expert=Expert(orthogonalize="reference"))
theirs = torch.optim.Muon(weights[1])
for step in range(3):
    for a, b in zip(*weights):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    ours.step()
    theirs.step()
assert all(map(torch.equal, *weights))
print("equal")
"""


@pytest.mark.parametrize("entry", selection.FEATURES, ids=lambda entry: entry.name)
def test_a_package_without_a_feature_trains_with_torchs_bits(entry: selection.Entry, tmp_path: Path) -> None:
    """To delete a feature, delete its file and its line."""
    copied = tmp_path / "titan_muon"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__", "trainer"))
    listed = copied / "selection.py"
    text = listed.read_text()
    kept = [line for line in text.splitlines(keepends=True) if f'"{entry.file}"' not in line]
    assert len(kept) == text.count("\n") - 1
    listed.write_text("".join(kept))
    module = importlib.util.resolve_name(entry.file, "titan_muon")
    (tmp_path / module.replace(".", "/")).with_suffix(".py").unlink()
    code = TORCHS.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["equal"], done.stderr
