"""Rounding in 16 bits neither makes an iteration diverge nor overflows, for any set of coefficients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.accuracy import relative_error
from titan_muon import Muon
from titan_muon.options import OptionError
from titan_muon.orthogonalize import COEFFICIENTS, DTYPES, Dispatch, Method, iteration, orthogonalize
from titan_muon.orthogonalize.coefficients import LARGEST, PRESCALED, has_margin
from titan_muon.orthogonalize.dispatch import restarts

STEPS = {name: 5 if len(table) == 1 else len(table) for name, table in COEFFICIENTS.items()}
METHODS = {
    "bfloat16": Method("standard", "bfloat16"),
    "reference": Method("reference", "bfloat16"),
    "float16": Method("standard", "float16"),
    "gram": Method("gram", "float16"),
}
# As published, without a margin: each step ends where the next begins to diverge.
PUBLISHED_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def dominated(ratio: float, *shape: int) -> Tensor:
    """One row has nearly all of the norm."""
    stack = drawn(*shape)
    stack[:, 0] *= ratio
    return stack


STACKS = {
    "gaussian": drawn(8, 64, 256),
    "small": drawn(100, 16, 64),
    "smaller": drawn(100, 4, 16),
    "a row": drawn(20, 1, 64),
    "square": drawn(8, 32, 32),
    "low rank": drawn(2, 64, 4) @ drawn(2, 4, 256) + 1e-3 * drawn(2, 64, 256),
    "rank one": drawn(2, 64, 1) @ drawn(2, 1, 256),
    "a row of 1,000 norms": dominated(1e3, 2, 64, 256),
    "a row of 10,000 norms": dominated(1e4, 2, 64, 256),
    "a tall column": dominated(1e3, 2, 64, 256).mT.contiguous(),
    "nearly orthogonal": torch.linalg.qr(drawn(2, 256, 64))[0].mT + 1e-3 * drawn(2, 64, 256),
}


def run(stack: Tensor, name: str, method: Method) -> Tensor:
    computed = iteration(name, STEPS[name], 1e-14)
    broken = restarts(len(computed.steps)) if method.algorithm == "gram" else ()
    return orthogonalize(stack, computed, Method(method.algorithm, method.dtype, broken)).float()


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_no_set_diverges_in_16_bits(name: str, method: str) -> None:
    if name in PRESCALED and method == "reference":
        pytest.skip("refused")
    largest = {what: torch.linalg.matrix_norm(run(stack, name, METHODS[method]), 2) for what, stack in STACKS.items()}
    assert {what: norms.max().item() for what, norms in largest.items() if not (norms < 1.25).all()} == {}


@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_every_set_has_twice_the_margin_that_bfloat16_needs(name: str) -> None:
    assert has_margin(iteration(name, STEPS[name], 1e-14).steps, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_set_is_refused_in_the_dtypes_that_make_it_diverge(dtype: str) -> None:
    build: dict[str, Any] = {"params": [("w", torch.nn.Parameter(drawn(64, 256)))], "ns_dtype": dtype}
    if dtype == "float32":
        Muon(**build, ns_coefficients=PUBLISHED_CANS).build()
    else:
        with pytest.raises(OptionError, match=rf"^ns_coefficients has no margin for rounding in {dtype}: .* s = 1\.02"):
            Muon(**build, ns_coefficients=PUBLISHED_CANS).build()
    scaled = tuple((a / 1.02, b / 1.02**3, c / 1.02**5) for a, b, c in PUBLISHED_CANS[:-1])
    Muon(**build, ns_coefficients=(*scaled, PUBLISHED_CANS[-1])).build()


def test_auto_computes_a_set_without_a_margin_in_float32() -> None:
    for device in ("cpu", "cuda"):
        assert Dispatch(device=device, cpu_bfloat16=True).choose(1024, 4096, PUBLISHED_CANS).dtype == "float32"
    with pytest.raises(OptionError, match=r"in bfloat16: .* compute in float32"):
        Dispatch("reference").choose(1024, 4096, PUBLISHED_CANS)
    with pytest.raises(OptionError, match=r"in float32: .* choose a named set"):
        Dispatch(dtype="float32").choose(1024, 4096, ((3.0, -4.0, 2.0),) * 5)


def split_product(a: Tensor, b: Tensor, c: Tensor | None, beta: float, alpha: float, out: Tensor | None) -> Tensor:
    """A product in four parts, which float16 holds and adds, as cuBLAS may do. `alpha` comes last."""
    total = torch.zeros(a.size(0), a.size(1), b.size(2), dtype=torch.float16)
    for columns, rows in zip(a.split(-(-a.size(2) // 4), dim=2), b.split(-(-b.size(1) // 4), dim=1), strict=True):
        total += torch.matmul(columns.float(), rows.float()).half()
    result = alpha * total.float() + (0 if c is None or beta == 0 else beta * c.float())
    return result.half() if out is None else out.copy_(result)


@pytest.mark.parametrize("method", ["float16", "gram"])
@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_float16_sums_of_partial_products_neither_overflow_nor_lose_digits(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `auto` takes the Gram iteration for no other shapes.
    long = {what for what, stack in STACKS.items() if {*stack.shape[1:]} == {64, 256}}
    stacks = {what: stack[:4] for what, stack in STACKS.items() if method != "gram" or what in long}
    exact = {what: run(stack, name, Method("standard", "float32")) for what, stack in stacks.items()}
    baseline = {what: run(stack, name, METHODS["bfloat16"]) for what, stack in stacks.items()}
    monkeypatch.setattr(torch, "bmm", lambda a, b, out=None: split_product(a, b, None, 0, 1, out))
    monkeypatch.setattr(
        torch,
        "baddbmm",
        lambda c, a, b, *, beta=1.0, alpha=1.0, out=None: split_product(a, b, c, beta, alpha, out),
    )
    errors = {what: relative_error(run(stack, name, METHODS[method]), exact[what]) for what, stack in stacks.items()}
    limits = {what: relative_error(baseline[what], exact[what]).max().item() + 0.01 for what in stacks}
    assert {what: error for what, error in errors.items() if not (error < limits[what]).all()} == {}


def test_float16_holds_the_square_of_a_row_with_the_largest_norm() -> None:
    from titan_muon.orthogonalize.newton_schulz import FLOAT16_NORM

    assert (FLOAT16_NORM * LARGEST) ** 2 <= 2**16
    assert torch.finfo(torch.float16).max > (FLOAT16_NORM * LARGEST * 0.999) ** 2
