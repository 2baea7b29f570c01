"""Newton-Schulz of torch.optim.Muon, and the coefficients."""

import math

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.reference_muon import newton_schulz
from titan_muon.orthogonalize import COEFFICIENTS, coefficients, reference
from titan_muon.orthogonalize.coefficients import PRESCALED

JORDAN = (3.4445, -4.7750, 2.0315)
STEPS = {name: 5 if len(table) == 1 else len(table) for name, table in COEFFICIENTS.items()}
SHAPES = [(48, 20), (20, 48), (32, 32), (1, 40), (40, 1), (1, 1)]


def drawn(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_equals_torch_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = drawn(shape, dtype)
    result = reference(matrix, coefficients("keller_jordan", 5), 1e-7)
    expected = _zeropower_via_newtonschulz(matrix.clone(), JORDAN, 5, 1e-7)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected)
    assert torch.equal(result, newton_schulz(matrix))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_never_written_to(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = drawn(shape, dtype)
    before = matrix.clone()
    result = reference(matrix, coefficients("keller_jordan", 5), 1e-7)
    assert torch.equal(matrix, before)
    assert result.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", sorted(set(COEFFICIENTS) - set(PRESCALED)))
@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (40, 24)])
def test_singular_values_approach_one_and_singular_vectors_stay(name: str, shape: tuple[int, int]) -> None:
    matrix = drawn(shape)
    result = reference(matrix, coefficients(name, STEPS[name]), 1e-7).float()
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5
    assert values.max() < 1.35
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    strong = s > 0.2 * s.max()
    assert (u[:, strong].T @ result @ vh[strong].T).diagonal().min() > 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_matrix_stays_zero(shape: tuple[int, int]) -> None:
    assert torch.equal(
        reference(torch.zeros(shape), coefficients("keller_jordan", 5), 1e-7).float(), torch.zeros(shape)
    )


def test_the_size_of_a_matrix_does_not_matter() -> None:
    matrix, steps = drawn((20, 48)), coefficients("keller_jordan", 5)
    assert torch.equal(reference(matrix, steps, 1e-7), reference(1024 * matrix, steps, 1e-7))


def test_a_single_step_set_is_repeated() -> None:
    assert coefficients("keller_jordan", 3) == (JORDAN,) * 3


def test_a_schedule_is_used_unchanged() -> None:
    assert coefficients("you_jiacheng", 5) == COEFFICIENTS["you_jiacheng"]
    assert coefficients([[1, 2, 3], [4, 5, 6]], 2) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


@pytest.mark.parametrize(
    ("choice", "steps", "message"),
    [
        ("keller_jordon", 5, r"'keller_jordon' is not one of .*did you mean 'keller_jordan'\?"),
        (
            "quintic!",
            5,
            "keller_jordan, you_jiacheng, polar_express, polar_express_cushion, deepseek_v4, cans, aol",
        ),
        ("you_jiacheng", 4, "has 5 steps but ns_steps = 4"),
        ([[1, 2, 3]] * 2, 5, "has 2 steps but ns_steps = 5"),
        ([], 1, "has 0 steps but ns_steps = 1"),
        ("keller_jordan", -1, "ns_steps = -1"),
        ([[1, 2]], 1, "not three finite numbers"),
        ([[1, 2, 3, 4]], 1, "not three finite numbers"),
        ([[1, 2, math.nan]], 1, "not three finite numbers"),
        ([[1, math.inf, 3]], 1, "not three finite numbers"),
    ],
)
def test_wrong_coefficients_are_refused(choice: object, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coefficients(choice, steps)  # type: ignore[arg-type]


def test_polar_express_uses_the_papers_steps_and_repeats_the_last_step() -> None:
    steps = coefficients("polar_express", 12)
    assert steps[:5] == COEFFICIENTS["polar_express"]
    assert steps[7:] == ((1.875, -1.25, 0.375),) * 5
    values = torch.logspace(-4, 0, 200, dtype=torch.float64)
    error = []
    for count in (5, 7, 12):
        result = values
        for a, b, c in coefficients("polar_express", count):
            result = a * result + b * result**3 + c * result**5
        error.append((result[values >= 1e-3] - 1).abs().max().item())
    assert error[0] > error[1] > error[2]
    assert error[2] < 1e-12


@pytest.mark.parametrize(
    ("choice", "steps"),
    [
        pytest.param([1.0, 2.0, 3.0], 3, id="one triple instead of a list of them"),
        pytest.param([["a", 2, 3]], 1, id="a word"),
        pytest.param("keller_jordan", 0, id="no steps"),
    ],
)
def test_coefficients_must_be_lists_of_triples(choice: object, steps: int) -> None:
    with pytest.raises(ValueError, match=r"ns_coefficients|ns_steps"):
        coefficients(choice, steps)  # type: ignore[arg-type]
