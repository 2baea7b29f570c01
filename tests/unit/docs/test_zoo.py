"""docs/zoo.md says how the defaults read every family of TorchTitan and many architectures of Hugging Face."""

import importlib.util

import pytest

from docs import make_zoo

PAGE = make_zoo.PAGE.read_text(encoding="utf-8")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
without_it = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers: pip install 'titan-muon[zoo]'")


def lines(table: str) -> list[str]:
    _, _, rest = PAGE.partition(make_zoo.START.format(table))
    body, _, _ = rest.partition(make_zoo.END.format(table))
    return body.removeprefix(make_zoo.HEADER).splitlines(keepends=True)


def test_the_page_has_every_family_of_torchtitan() -> None:
    folder = importlib.util.find_spec("torchtitan.models")
    assert folder is not None
    assert folder.submodule_search_locations is not None
    (place,) = folder.submodule_search_locations
    installed = {path.parent.name for path in make_zoo.Path(place).glob("*/model*") if path.parent.name != "common"}
    assert installed == set(make_zoo.TITAN)
    assert [line.split("|")[1].split()[0] for line in lines("torchtitan")] == [*make_zoo.TITAN, "fused"]


def test_the_page_has_the_architectures_of_hugging_face() -> None:
    assert [line.split("|")[1].strip() for line in lines("hugging face")] == list(make_zoo.HUGGING_FACE)
    assert len(make_zoo.HUGGING_FACE) >= 20


# Flux is imported with the text encoders of Hugging Face.
@pytest.mark.parametrize("family", [pytest.param(f, marks=without_it) if f == "flux" else f for f in make_zoo.TITAN])
def test_families_of_torchtitan_have_the_roles_of_the_page(family: str) -> None:
    flavor = make_zoo.TITAN[family]
    assert make_zoo.row(f"{family} {flavor}", make_zoo.titan_model(family, flavor)) in lines("torchtitan")


def test_fused_layouts_of_torchtitans_main_have_the_splits_of_the_page() -> None:
    assert make_zoo.row("fused layers of main", make_zoo.fused_model()) == lines("torchtitan")[-1]


@without_it
@pytest.mark.parametrize("architecture", make_zoo.HUGGING_FACE)
def test_architectures_of_hugging_face_have_the_roles_of_the_page(architecture: str) -> None:
    assert make_zoo.row(architecture, make_zoo.hugging_face_model(architecture)) in lines("hugging face")


@pytest.mark.parametrize("table", make_zoo.TABLES)
def test_muon_trains_more_than_90_percent_of_every_model(table: str) -> None:
    shares = {line.split("|")[1]: float(line.split("|")[2].strip(" %")) for line in lines(table)}
    assert min(shares.values()) > 90
