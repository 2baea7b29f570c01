"""Sets of coefficients: what a user may ask for, the published constants, and the margin for rounding."""

import math
from typing import Any

import pytest
import torch

from benchmarks.accuracy import orthogonality_error, relative_error, singular_band
from tests.unit.orthogonalize.test_newton_schulz import STEPS, after, drawn
from titan_muon import Expert, Muon
from titan_muon.engine.orthogonalize import COEFFICIENTS, DTYPES, Dispatch, coefficients, iterate, largest_value
from titan_muon.engine.orthogonalize.coefficients import LARGEST, has_margin
from titan_muon.engine.orthogonalize.newton_schulz import FLOAT16_NORM
from titan_muon.options import OptionError

# As published, without a margin: each step ends where the next begins to diverge.
PUBLISHED_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def test_one_step_is_repeated_and_a_schedule_is_used_unchanged() -> None:
    assert coefficients("keller_jordan", 3) == ((3.4445, -4.7750, 2.0315),) * 3
    assert coefficients("you_jiacheng", 5) == COEFFICIENTS["you_jiacheng"]
    assert coefficients([[1, 2, 3], [4, 5, 6]], 2) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_polar_express_uses_the_papers_steps_and_repeats_the_last_step() -> None:
    steps = coefficients("polar_express", 12)
    assert steps[:5] == COEFFICIENTS["polar_express"]
    assert steps[7:] == ((1.875, -1.25, 0.375),) * 5
    values = torch.logspace(-3, 0, 200, dtype=torch.float64)
    values = after(steps, values)
    assert (values - 1).abs().max() < 1e-12


def test_the_cushioned_set_equals_the_published_set_after_scaling_by_1_02() -> None:
    cushioned = COEFFICIENTS["polar_express_cushion"]
    stack = drawn(1, 24, 60).double()
    x = stack / (1.02 * stack.norm())
    for a, b, c in ((8.156554524902461, -22.48329292557795, 15.878769915207462), *cushioned[1:]):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    assert relative_error(iterate(stack, cushioned, 1e-7, torch.float64), x).item() < 1e-12


@pytest.mark.parametrize(("name", "threshold"), [("pion", math.sqrt(2 / 3)), ("pion_promotion", 0.523)])
def test_pion_keeps_singular_values_above_a_threshold_and_removes_those_below(name: str, threshold: float) -> None:
    """The threshold is the fixed point sqrt(2 / 3) of suppression, or what promotion maps there."""
    steps = coefficients(name, 5)
    assert steps[-1] == (0.0, 5 / 2, -3 / 2)
    assert (steps[0] == (15 / 8, -10 / 8, 3 / 8)) == (name == "pion_promotion")
    values = torch.tensor([0.9 * threshold, 1.1 * threshold, 1.0], dtype=torch.float64)
    values = after((*steps, *steps[-1:] * 5), values)
    assert torch.allclose(values, torch.tensor([0.0, 1.0, 1.0]).double(), atol=1e-3)


def test_a_cubic_iteration_converges_to_the_polar_factor() -> None:
    stack = drawn(2, 24, 60).double()
    u, _, vh = torch.linalg.svd(stack, full_matrices=False)
    result = iterate(stack, coefficients([(1.5, -0.5, 0.0)], 40), 1e-7, torch.float64)
    assert relative_error(result, u @ vh).max() < 1e-10
    assert orthogonality_error(result).max() < 1e-10
    assert all(torch.allclose(value, torch.ones(2).double(), atol=1e-10) for value in singular_band(result))
    # Both figures see a matrix that is not orthogonal.
    assert orthogonality_error(2 * result).min() > 1
    assert singular_band(2 * result)[1].min() > 1


@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_the_largest_value_is_the_polynomials_and_every_set_has_twice_the_margin_of_bfloat16(name: str) -> None:
    steps = coefficients(name, STEPS[name])
    values = torch.linspace(0, 1.01, 4001, dtype=torch.float64)
    values = after(steps, values)
    # Later steps make the peaks of the first ones narrower than the distance of these values.
    assert 0.99 * largest_value(steps) < values.abs().max() <= largest_value(steps) + 1e-9
    assert has_margin(steps, 2 * torch.finfo(torch.bfloat16).eps)
    assert largest_value(((100.0, -1e3, 1e9),) * 9) == math.inf


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_set_is_refused_in_the_dtypes_that_make_it_diverge(dtype: str) -> None:
    build: dict[str, Any] = {"params": [("w", torch.nn.Parameter(drawn(64, 256)))], "expert": Expert(ns_dtype=dtype)}
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


def test_float16_holds_the_square_of_a_row_with_the_largest_norm() -> None:
    assert (FLOAT16_NORM * LARGEST) ** 2 <= 2**16
    assert torch.finfo(torch.float16).max > (FLOAT16_NORM * LARGEST * 0.999) ** 2
