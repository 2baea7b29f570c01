"""A run of two ranks: its files, and sample, evaluate and export on it: loss, text by seed, weights, bad input."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.dist.harness import run_ranks
from titan_muon.trainer.commands import start
from titan_muon.trainer.commands.saved_model import open_saved
from titan_muon.trainer.recipe import RecipeError, load
from titan_muon.trainer.run import job
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config
from titan_muon.trainer.run_folder import Checksum, RunFolder

SCRIPTS = Path(__file__).parents[3] / "scripts"

SHORT = {
    "training__steps": 2,
    "training__mixed_precision_param": "bfloat16",
    "checkpoint__freq": 2,
    "validator__steps": 4,
    "placement__muon": "owned",
    "parallelism__expert_parallel_degree": 2,
}


def trained(rank: int, world_size: int, folder: Path, values: dict[str, object]) -> Path:
    return tiny.train(tiny.recipe(folder, **values))


def finished(rank: int, world_size: int, folder: Path, run: Path) -> list[str]:
    lines: list[str] = []
    job.print_on_rank0 = lines.append
    assert tiny.train(tiny.recipe(folder, **SHORT, checkpoint__load=str(run), checkpoint__load_only=True)) == run
    return lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny.write_recipe(folder)
    return run_ranks(trained, 2, folder, SHORT)[0]


def test_a_recipes_folder_stands_for_its_newest_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("evaluate", [str(run.parent), "--sequences", "1"]) == 0
    assert capsys.readouterr().err == f"{run}: the newest run in {run.parent}\n"


@pytest.mark.parametrize("name", ["sample", "evaluate"])
def test_a_wrong_folder_is_refused_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    words = [name, str(tmp_path)]
    code = f"import sys; from titan_muon.command import main; print(main({words}), 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout
    assert shown == "2 False\n"


@pytest.mark.filterwarnings("error:Mismatch dtype")
def test_evaluate_gives_the_validation_loss_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process reads experts, owned and sharded parameters of 2 ranks, and the sequences of the validation."""
    assert start("evaluate", [str(run), "--sequences", "16"]) == 0
    shown = capsys.readouterr().out
    loss = float(shown.split("held-out loss ")[1].split()[0])
    assert loss == pytest.approx(tiny.records(run, "val_loss")[2], abs=2e-4)
    bits = float(shown.split("per token, ")[1].split()[0])
    assert bits == pytest.approx(tiny.records(run, "bits_per_byte")[2], abs=2e-4)


def test_a_copy_of_a_run_is_evaluated_on_text_at_another_place(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The held-out documents follow from their content."""
    text = Path(shutil.copytree(run.parents[2] / "corpus", tmp_path / "text"))
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    recipe = (copied / "recipe.toml").read_text()
    (copied / "recipe.toml").write_text(recipe.replace("/corpus/", "/gone/"))
    words = [str(copied), "--sequences", "16"]
    assert start("evaluate", words) == 2
    assert capsys.readouterr().err.endswith("; name the run's text by --files\n")
    assert start("evaluate", [*words, "--files", str(text)]) == start("evaluate", [str(run), *words[1:]]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_sample_continues_the_prompt_and_repeats_by_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert start("sample", [str(run), "--prompt", "matrix", "--tokens", "12", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("matrix") and len(text) > len("matrix\n") for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_a_finished_run_names_the_next_commands(run: Path) -> None:
    lines = run_ranks(finished, 2, run.parents[2], run)[0]
    (line,) = (line for line in lines if line.startswith("nothing to do: step 2 of 2 is done"))
    assert line.endswith(f"; titan-muon evaluate, sample and export read {run}")
    assert (run / "checkpoint/step-2/.metadata").is_file()


def test_a_run_of_two_ranks_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    words = [str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert start("export", words) == 2
    assert "--drop-expert-bias" in capsys.readouterr().err
    command = [sys.executable, str(SCRIPTS / "export.py"), *words, "--drop-expert-bias"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"step 2 of {run} is in {tmp_path}/out\n"
    written, model = load_file(tmp_path / "out" / "model.safetensors"), open_saved(run, dtype="bfloat16").model
    experts = model.get_parameter("layers.3.moe.routed_experts.inner_experts.w1_EFD")
    assert torch.equal(written["model.layers.3.mlp.experts.15.gate_proj.weight"], experts[15])
    assert start("export", words) == 2
    assert capsys.readouterr().err == f"export: {tmp_path}/out exists; name a new folder\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sample RUN/checkpoint", "neither a run (recipe.toml, metrics.jsonl) nor a folder with runs"),
        ("evaluate EMPTY", "no complete checkpoint; train with"),
        ("sample RUN --step 7", "--step 7"),
        ("sample DAMAGED", "has other bytes than were saved"),
        ("evaluate DAMAGED", "has other bytes than were saved"),
        ("sample RUN --temperature nan", "sample: --temperature nan: must be"),
        ("sample RUN --top-k -1", "sample: --top-k -1: must be"),
        ("sample RUN --tokens 0", "sample: --tokens 0: must be"),
        ("evaluate RUN --sequences 0", "evaluate: --sequences 0: must be"),
    ],
)
def test_bad_input_is_refused_in_a_single_line(
    run: Path, tmp_path: Path, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text((run / "recipe.toml").read_text())
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    file = damaged / "checkpoint" / "step-2" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    for word, path in (("RUN", run), ("EMPTY", tmp_path), ("DAMAGED", damaged)):
        words = words.replace(word, str(path))
    name, *others = words.split()
    assert start(name, others) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert "passed over" in shown or shown.count("\n") == 1


def test_a_run_is_read_without_the_files_of_its_first_step(run: Path) -> None:
    """`checkpoint.initial_load_path` and `model.hf_assets_path` may be gone by then."""
    folder = RunFolder(run)
    section = replace(folder.recipe.checkpoint, initial_load_path="/gone", initial_load_in_hf=True)
    vars(folder)["recipe"] = replace(folder.recipe, checkpoint=section)
    read = folder.recipe_to_read
    assert (read.checkpoint.initial_load_path, read.checkpoint.initial_load_in_hf) == (None, False)
    assert trainer_config(read, Run(str(run)), 1).checkpoint.initial_load_path is None


FAMILY = """
import models
from titan_muon import registry

registry.models.register("their_model", registry.models.get("qwen3"))
"""


def test_a_run_of_an_imported_family_is_exported(run: Path, tmp_path: Path) -> None:
    """`imports` of the recipe count for every command on the run, also from a moved folder without the corpus."""
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    recipe = (moved / "recipe.toml").read_text().replace('"qwen3"', '"their_model"')
    assert "/corpus/" in recipe
    recipe = recipe.replace("/corpus/", "/gone/")
    (moved / "recipe.toml").write_text(recipe.replace("imports = []", 'imports = ["their_module"]'))
    (tmp_path / "their_module.py").write_text(FAMILY)
    words = [sys.executable, str(SCRIPTS / "export.py"), "moved", "out", "--drop-expert-bias"]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "their_module.py").unlink()
    refused = subprocess.run([*words[:3], "out2"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (refused.returncode, "imports: there is no module 'their_module'" in refused.stderr) == (2, True)


def garbled(rank: int, world_size: int, folder: Path) -> str:
    run = tiny.train(tiny.recipe(folder, training__steps=3, validator__enable="false"))
    damaged = next((run / "checkpoint" / "step-3").glob("*.distcp"))
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    # With its own checksum, which would show the damage before the load.
    sums, checksum = json.loads(damaged.with_name("checksums.json").read_text()), Checksum.of(damaged)
    sums["files"][damaged.name] = {"bytes": checksum.bytes, "crc32": f"{checksum.crc32:08x}"}
    damaged.with_name("checksums.json").write_text(json.dumps(sums))
    with pytest.raises(RecipeError) as error:
        tiny.train(tiny.recipe(folder, checkpoint__load=str(run)))
    return str(error.value)


def test_a_garbled_checkpoint_with_matching_checksums_is_named(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    message = run_ranks(garbled, 1, tmp_path)[0]
    assert re.search(r"step-3.* cannot be loaded.*checkpoint\.load_step", message), message


PROFILED = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1}
TWO = {"training__steps": 2, "metrics__log_freq": 2, **{f"profiler__{key}": value for key, value in PROFILED.items()}}


def test_the_run_folder_has_every_file_of_a_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny.write_recipe(tmp_path)
    folder = run_ranks(trained, 2, tmp_path, TWO)[0]
    assert load(folder / "recipe.toml").training == tiny.recipe(tmp_path, **TWO).training
    assert (tmp_path / "runs" / "tiny" / "latest").read_text().strip() == folder.name
    assert (folder / "checkpoint" / "step-2" / ".metadata").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    step, validation = lines[1], lines[2]
    assert {"data", "forward_backward", "clip", "optimizer", "step"} <= step["time"].keys()
    assert sum(step["time"].values()) <= 2 * step["time"]["step"] + 1e-9
    assert step["tokens"] == 2 * 2 * 2 * 64
    assert validation["bits_per_byte"] == pytest.approx(validation["val_loss"] / 0.6931472 * 1.0, rel=0.02)
    tags = EventAccumulator(str(folder / "tb")).Reload().Tags()["scalars"]
    assert {"loss/train", "loss/validation", "loss/bits_per_byte", "lr/muon"} <= set(tags)
    assert {"step/tokens_per_second", "time/optimizer", "step/memory_gib"} <= set(tags)
    assert (folder / "optimizers.txt").read_text().count("\nMuon step: ") == 1
    # Ranges of a step in a trace: tests/unit/step.
    files = sorted((folder / "profiling" / "traces").rglob("rank*_trace.json*"))
    assert [file.name.partition("_")[0] for file in files] == ["rank0", "rank1"]
