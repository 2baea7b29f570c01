"""scripts/finetune.py trains a small case and writes the losses."""

from pathlib import Path
from typing import Any

from scripts import finetune


def test_finetuning_compares_every_pair_of_optimizers(tmp_path: Path) -> None:
    arguments = finetune.Arguments(
        tmp_path, pretrain_steps=8, finetune_steps=3, seeds=1, rates=(1e-3,), dim=32, batch=4
    )
    results: dict[str, Any] = finetune.main(arguments)
    pairs = {(row["pretrain"], row["finetune"]) for row in results["rows"]}
    assert len(results["rows"]) == len(pairs) == 4
    assert all(row["help"] < row["help_before"] for row in results["rows"])
    assert "| adamw | muon | 0.001 |" in (tmp_path / "finetune.md").read_text()
