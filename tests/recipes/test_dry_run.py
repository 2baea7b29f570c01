"""`--dry-run` as a user reads it: the verdict, alternatives, and the page."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "small"
[model]
name = "qwen3"
flavor = "moe_tiny"
[data]
source = "files"
files = ["absent/*.txt"]
tokenizer = "hf"
tokenizer_path = "absent"
[training]
local_batch_size = 1
seq_len = 128
"""


def run(folder: Path, *words: str, code: int = 0) -> str:
    file = folder / "small.toml"
    file.write_text(RECIPE)
    command = [sys.executable, "-W", "ignore", "train.py", "--config", str(file), "--dry-run", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


class Page(HTMLParser):
    """Collects ids, the script, and everything that a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.script, self._inside = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.loaded += [value for key in ("src", "href") if (value := found.get(key))]
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        self.script += data if self._inside else ""


def test_a_dry_run_decides_and_its_page_stands_alone(tmp_path: Path) -> None:
    page, numbers = tmp_path / "plan.html", tmp_path / "plan.json"
    words = ("--world-size", "16", "--machine", "h100x8", "--html", str(page), "--json", str(numbers))
    text = run(tmp_path, *words, "--parallelism.expert_parallel_degree", "2")
    assert re.search(r"memory +fits: [\d.]+ GiB of 79.0 GiB", text)
    assert re.search(r"training step +[\d.]+ \w+ \(.* to .*\) for [\d,]+ tokens", text)
    assert "over AdamW" in text
    assert "modelled" in text
    assert "[training]" not in text, "the recipe is behind --verbose"
    assert "data.files" in text.rsplit("training would be refused", 2)[1]
    assert "data.tokenizer_path = 'absent' has no tokenizer.json" in text
    assert json.loads(numbers.read_text())["verdict"]["fits"] is True

    parsed = Page(page.read_text())
    assert parsed.loaded == [], "nothing is loaded from elsewhere"
    assert {"timeline", "balance", "memory", "search", "rows", "recipe", "verdict"} <= parsed.ids
    assert "prefers-color-scheme: dark" in page.read_text()
    data = json.loads(parsed.script.split("const data = ", 1)[1].split(";\n", 1)[0].replace("<\\/", "</"))
    (part,) = data["parts"]
    assert part["ranks"] == list(range(16))
    assert {part["stages"][span[1]] for span in part["spans"]} >= {"advance", "orthogonalize", "apply"}
    assert {span[0] for span in part["spans"]} == set(range(16))
    assert {entry[0] for entry in part["parameters"]} >= {"tok_embeddings.weight", "norm.weight"}
    assert "seq_len = 128" in data["recipe"]


def test_alternatives_are_compared_and_the_fastest_that_fits_is_first(tmp_path: Path) -> None:
    text = run(tmp_path, "--world-size", "4", "--compare", "placement.muon=owned,shard0", "muon.lr=1e-3,-1")
    lines = [line for line in text.splitlines() if "placement.muon" in line]
    tabled = [line for line in lines if "refused" not in line]
    assert len(tabled) == 2
    times = [float(re.split(r" {2,}", line.strip())[3].replace(",", "")) for line in tabled]
    assert times == sorted(times)
    assert sum("refused: " in line and "muon.lr" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--compare", "placement.moun=owned"), "Did you mean"),
        (("--compare", "placement.muon"), "write KEY=VALUE,VALUE"),
        (("--html", "absent/plan.html"), "--html absent/plan.html: cannot be written"),
        (("--machine", "h200"), "machine.name"),
    ],
)
def test_a_wrong_question_is_one_error(words: tuple[str, ...], part: str, tmp_path: Path) -> None:
    text = run(tmp_path, *words, code=2)
    assert part in text.splitlines()[-1]
