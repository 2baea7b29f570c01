"""The contract of torch.optim.Optimizer: the cases of PyTorch's optim_db and TestOptimRenewed that Muon could break.

A test has the name of PyTorch's test if PyTorch has the case. `DIFFERENCES` lists the intended differences of Muon and
Hybrid; docs/frameworks.md gives the reasons. tests/parity has closures, groups, zero gradients and reloads,
tests/unit/test_hybrid.py schedulers, and tests/dist/comm/test_safety.py frozen and strided parameters.
"""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import optim_db

from tests.shared import muon_keywords
from tests.unit.test_hybrid import Decoder
from titan_muon import Hybrid, Muon

INFO = next(info for info in optim_db if info.optim_cls is torch.optim.Muon)

DIFFERENCES: dict[str, str] = {
    "only support 2D parameters": "stacks of matrices (3D) are taken too",
    "does not support complex parameters": "refused at construction instead of in the step, as a ValueError",
    "test_forloop_goes_right_direction[not contiguous]": "storage must be contiguous: its views are updated",
    "test_step_is_noop_when_params_have_no_grad": "a missing gradient is an error (on_bad_gradient = 'error')",
    "test_all_frozen": "a model without a trained parameter is an error, not a step that does nothing",
}
"""By PyTorch's case: the behaviour here."""


def muon(params: Any, **keywords: Any) -> Muon:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Muon(params, **muon_keywords(**keywords))


def hybrid_of(params: list[Tensor], **keywords: Any) -> Hybrid:
    """A Hybrid of a model with the parameters as linear layers."""
    model = nn.Module()
    for index, param in enumerate(params):
        layer = nn.Linear(*param.shape[::-1], bias=False)
        layer.weight = param if isinstance(param, nn.Parameter) else nn.Parameter(param)
        model.add_module(f"layer{index}", layer)
    options = {key: keywords.pop(key) for key in ("lr", "weight_decay") if key in keywords}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = muon_keywords(**keywords)
        return Hybrid(model, expert=split.pop("expert"), muon=split, **options)


OPTIMIZERS: dict[str, Callable[..., Any]] = {"muon": muon, "hybrid": hybrid_of}


def inputs() -> list[Any]:
    return [pytest.param(case.kwargs, id=case.desc) for case in INFO.optim_inputs_func(device=torch.device("cpu"))]


def weights(dtype: torch.dtype = torch.float32, count: int = 2) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(10, 5 + i, generator=generator).to(dtype)) for i in range(count)]


def stepped(make: Callable[..., Any], params: list[nn.Parameter], **keywords: Any) -> Any:
    optimizer = make(params, **keywords)
    set_gradients(params)
    optimizer.step()
    return optimizer


def set_gradients(params: list[nn.Parameter], step: int = 0) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


both = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
every_input = pytest.mark.parametrize("keywords", inputs())


@both
@every_input
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_steps_equal_torchs_muon(make: Callable[..., Any], keywords: dict[str, Any], dtype: torch.dtype) -> None:
    params, others = weights(dtype), weights(dtype)
    theirs = torch.optim.Muon(params, **keywords)
    options = {"orthogonalize": "reference", "rounding": "nearest", "wire_dtype": "float32"}
    ours = make(others, **{"weight_decay": 0.1, **keywords}, adjust_lr_fn="original", **options)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(others, step)
        theirs.step()
        ours.step()
    for param, other in zip(params, others, strict=True):
        # Momentum of other weights is float32 here, and in PyTorch of the weights' dtype.
        tolerance = {torch.float32: 0.0, torch.float64: 5e-4, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(param, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "case", INFO.optim_error_inputs_func(device="cpu", dtype=torch.float32), ids=lambda c: c.optimizer_error_input.desc
)
def test_errors(case: Any) -> None:
    error_input = case.optimizer_error_input
    params = weights() if error_input.params is None else error_input.params
    if error_input.desc in DIFFERENCES:
        params = [nn.Parameter(param) for param in params]
    if error_input.desc == "only support 2D parameters":
        assert muon(params).build().plan.matrices
    elif issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=case.error_regex):
            Muon(params, **muon_keywords(**error_input.kwargs))
    else:
        is_complex = error_input.desc == "does not support complex parameters"
        with pytest.raises(ValueError if is_complex else case.error_type, match="complex64" if is_complex else ""):
            muon(params, **error_input.kwargs)


@both
@every_input
def test_grads_are_never_inplaced_into(make: Callable[..., Any], keywords: dict[str, Any]) -> None:
    params = weights()
    optimizer = make(params, **keywords)
    for step in range(2):
        set_gradients(params, step)
        before = [(param.grad, param.grad.clone()) for param in params if param.grad is not None]
        optimizer.step()
        assert all(param.grad is grad for param, (grad, _) in zip(params, before, strict=True))
        assert all(torch.equal(grad, copied) for grad, copied in before)


def test_load_nontensor_step() -> None:
    """Older state dicts of AdamW count steps in numbers."""
    model, other = Decoder(), Decoder()
    hybrid, loading = Hybrid(model), Hybrid(other)
    model(torch.arange(8)).sum().backward()
    hybrid.step()
    state = copy.deepcopy(hybrid.state_dict())
    for values in state["state"].values():
        values.update({"step": values["step"].item()} if "step" in values else {})
    loading.load_state_dict(state)
    steps = [hybrid.state[model.embed.weight]["step"], loading.state[other.embed.weight]["step"]]
    assert steps == [torch.tensor(1.0)] * 2


@both
def test_save_load_equality_with_weights_only(make: Callable[..., Any]) -> None:
    params = weights()
    optimizer = stepped(make, params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    saved = optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    torch.testing.assert_close(loaded["state"], saved["state"], rtol=0, atol=0)


@both
def test_step_is_noop_when_params_have_no_grad(make: Callable[..., Any]) -> None:
    params = weights()
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="no gradient for"):
        make(params).step()
    make(params, on_bad_gradient="skip_missing").step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@both
def test_step_hooks_run_once_in_pytorchs_order(make: Callable[..., Any]) -> None:
    """Hooks of the optimizer and hooks of all optimizers, in PyTorch's order."""
    params, calls = weights(), []
    optimizer = make(params)
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append(("all before", o))),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append(("all after", o))),
        optimizer.register_step_pre_hook(lambda o, a, k: calls.append(("before", o))),
        optimizer.register_step_post_hook(lambda o, a, k: calls.append(("after", o))),
    ]
    set_gradients(params)
    optimizer.step()
    for handle in handles:
        handle.remove()
    own = [name for name, seen in calls if seen is optimizer]
    assert own == ["all before", "before", "after", "all after"]
    optimizer.step()
    assert [name for name, seen in calls if seen is optimizer] == own


@both
def test_state_dict_hooks_run_in_registration_order(make: Callable[..., Any]) -> None:
    """PyTorch's test_state_dict_post_hook and test_load_state_dict_pre_hook_and_prepend."""
    params, calls = weights(), list[str]()
    optimizer = stepped(make, params, lr=0.1)
    momentum = {param: optimizer.state[param]["momentum_buffer"].clone() for param in params}

    def times(lr: float, momentum: float) -> Callable[..., dict[str, Any]]:
        def hook(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
            states = {key: {"momentum_buffer": momentum * s["momentum_buffer"]} for key, s in state["state"].items()}
            return {"state": states, "param_groups": [{**g, "lr": g["lr"] * lr} for g in state["param_groups"]]}

        return hook

    def set_lr(optimizer: Any, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["lr"] = 1.0

    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    handle = optimizer.register_state_dict_post_hook(times(2.0, 1.0))
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.2]
    handle.remove()
    assert calls == ["before saving"]
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(times(3.0, 2.0))
    optimizer.register_load_state_dict_pre_hook(set_lr, prepend=True)
    optimizer.load_state_dict(state)
    assert calls[-1] == "after loading"
    assert [group["lr"] for group in optimizer.param_groups] == [3.0]
    assert all(torch.equal(optimizer.state[param]["momentum_buffer"], 2 * momentum[param]) for param in params)


@pytest.mark.parametrize("lr", [torch.tensor(0.01), torch.tensor([0.01])], ids=["0D", "1D"])
@both
def test_tensor_lr(make: Callable[..., Any], lr: Tensor) -> None:
    params, others = weights(), weights()
    optimizer, other = make(params, lr=lr.clone()), make(others, lr=0.01)
    scheduler: LRScheduler = StepLR(optimizer, 1, 0.5)
    same: LRScheduler = StepLR(other, 1, 0.5)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(others, step)
        optimizer.step()
        other.step()
        scheduler.step()
        same.step()
    for param, expected in zip(params, others, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


def test_mixed_dtypes() -> None:
    params = [*weights(torch.float32, 1), *weights(torch.bfloat16, 1), *weights(torch.float64, 1)]
    before = copy.deepcopy(params)
    stepped(muon, params)
    assert all(not torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_can_load_from_to_named_state_dict() -> None:
    params, others = weights(), weights()
    named, unnamed = muon([(f"w{i}", p) for i, p in enumerate(params)]), muon(others)
    set_gradients(params)
    named.step()
    state = named.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]
    unnamed.load_state_dict(state)
    assert unnamed.param_groups[0]["param_names"] == ["0.0", "0.1"]
    for param, other in zip(params, others, strict=True):
        assert torch.equal(named.state[param]["momentum_buffer"], unnamed.state[other]["momentum_buffer"])
