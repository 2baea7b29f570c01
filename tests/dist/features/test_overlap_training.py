"""Training with gathers in backward: the digits of training without, with accumulation and recomputed activations."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import RECIPE, losses, write_corpus
from titan_muon.features.early import EarlyGathers

DIM, LAYERS = 16, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def launches_and_losses(rank: int, world_size: int, path: str, overrides: list[str]) -> tuple[int, list[float]]:
    count = 0
    launch = EarlyGathers.launch

    def counted(self: EarlyGathers, *args: Any) -> None:
        nonlocal count
        count += 1
        launch(self, *args)

    EarlyGathers.launch = counted  # type: ignore[method-assign, assignment]
    curve = losses(rank, world_size, path, overrides)
    return count, curve


def test_backward_overlap_keeps_the_curve_of_a_recipe(tmp_path: Path) -> None:
    """Two passes to a step, and all activations computed anew in backward."""
    corpus = write_corpus(tmp_path)
    path = corpus / "recipe.toml"
    path.write_text(RECIPE.format(family="llama3", flavor="tiny", corpus=corpus, steps=2))
    options = ["--dump_folder", str(tmp_path / "runs"), "--training.seq_len", "64", "--muon.orthogonalize", "reference"]
    options += ["--activation_checkpoint.mode", "full", "--machine.node_gb", "1e-6", "--machine.tflops", "1"]
    options += ["--machine.tflops_float32", "1", "--machine.node_latency_us", "0"]
    runs = [run_ranks(launches_and_losses, 2, str(path), [*options, "--muon.overlap", o]) for o in ("none", "backward")]
    (without, with_overlap) = (run[0] for run in runs)
    assert with_overlap[1] == without[1]
    assert without[0] == 0
    assert with_overlap[0] > 2
