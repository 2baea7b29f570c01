"""docs/newton_schulz.md has the measured errors of every set of coefficients."""

import re

from docs import make_coefficients
from titan_muon.orthogonalize import COEFFICIENTS

NUMBER = re.compile(r"-?\d+\.\d+")


def test_the_table_has_every_set_and_the_errors() -> None:
    """Up to a unit of the last digit, because CPUs add in different orders."""
    page = make_coefficients.PAGE.read_text(encoding="utf-8")
    written = make_coefficients.written(page)
    assert NUMBER.sub("", page) == NUMBER.sub("", written)
    for old, new in zip(NUMBER.findall(page), NUMBER.findall(written), strict=True):
        assert abs(float(old) - float(new)) < 0.02
    assert all(f"| `{name}` |" in page for name in COEFFICIENTS)
