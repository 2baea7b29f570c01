"""The docs' Python examples run in one process, except blocks marked `cluster`."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Muon

DOCS = Path(__file__).parents[3] / "docs"
CLUSTER = {"overlap.md": 2}
"""Blocks marked ```python cluster: tests/dist/features run these calls on ranks."""
TESTED_ELSEWHERE = ("frameworks.md", "placements.md")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def namespace() -> dict[str, Any]:
    """A model of one attention layer with 32 heads, the Muon after a backward, and logits."""
    block = nn.ModuleDict({"wq": nn.Linear(16, 32 * 128, bias=False), "wk": nn.Linear(16, 8 * 128, bias=False)})
    block.wq, block.wk = block["wq"], block["wk"]
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    optimizer = Muon([(name, param) for name, param in block.named_parameters()])
    for param in block.parameters():
        param.grad = torch.zeros_like(param)
    return {"model": model, "optimizer": optimizer, "logits_max": torch.ones(32)}


PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page, "python") and page.name not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = namespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(page, "python"):
            exec(block, names)


def test_examples_for_a_cluster_are_counted() -> None:
    assert {page.name: n for page in sorted(DOCS.glob("*.md")) if (n := len(blocks(page, "python cluster")))} == CLUSTER


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "original"}])
def test_the_readme_names_the_adjust_lr_fn_of_an_equal_torch_optim_muon(options: dict[str, Any]) -> None:
    claim = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split("\n## ")[0].split())
    (default,) = re.findall(r'The update is that of `torch\.optim\.Muon\(adjust_lr_fn="(\w+)"\)`', claim)
    assert """PyTorch's default, `"original"`, makes smaller updates""" in claim
    ours, theirs = (nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    ours.grad = theirs.grad = torch.ones(64, 128) + torch.eye(64, 128)
    Muon([("w", ours)], orthogonalize="reference", **options).step()
    torch.optim.Muon([theirs], adjust_lr_fn=None if options else default).step()
    assert torch.equal(ours, theirs)


def test_the_glossary_is_in_order() -> None:
    words = re.findall(r"^- \*\*(.*?)\*\*", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.M)
    assert words == sorted(words, key=str.lower)
    assert len(words) >= 40
