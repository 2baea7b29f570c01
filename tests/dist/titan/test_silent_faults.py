"""Faults without an error of PyTorch, in a run of 2 ranks: one report names each fault."""

import contextlib
import io
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.dist.harness import on_ranks
from titan_muon.engine.tensors.dtensor import local
from titan_muon.options import OptionError
from titan_muon.trainer.checks import start
from titan_muon.trainer.data.loader import PackedDataLoader
from titan_muon.trainer.fault import RunFault, by_rank_0
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run.metrics import RunMetrics
from titan_muon.trainer.run.trainer import MuonTrainer
from titan_muon.trainer.storage.checksums import SummingWriter

SHORT = {
    "validator__enable": "false",
    "training__steps": 3,
    "lr_scheduler__warmup_steps": 0,
    "model__name": "llama3",
    "model__flavor": "tiny",
    "muon__expert__ns_dtype": "float32",
    "metrics__enable_tensorboard": "false",
}


def outcome(folder: Path, name: str, fault: AbstractContextManager[Any] | None = None, /, **values: object) -> str:
    """Output and error of a short run with a fault on every rank of this call."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            with nullcontext() if fault is None else fault:
                tiny.train(tiny.recipe(folder, **{"name": name, "checkpoint__enable": "false", **SHORT, **values}))
        except (RecipeError, RunFault, FloatingPointError) as error:
            return f"{shown.getvalue()}\n{type(error).__name__}: {error}"
    return shown.getvalue()


def write_recipe(folder: Path) -> None:
    if dist.get_rank() == 0:
        tiny.write_recipe(folder)
    dist.barrier()


# A number, a size, a choice and a seed.
OTHER_KEYS = {"adamw__lr": 0.5, "training__seq_len": 32, "optimizer__clip": "all", "data__seed": 7}


@on_ranks(2)
def test_different_starts_of_ranks_are_refused_with_key_and_values(rank: int, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for key, value in OTHER_KEYS.items():
        text = outcome(tmp_path, "keys", **({key: value} if rank else {}))
        assert f"{key.replace('__', '.')} is " in text
        assert str(value) in text
        assert "on rank 0" in text
        assert "on rank 1" in text
    edited = tmp_path / "edited"
    if rank:
        shutil.copytree(tmp_path / "corpus", edited)
        (edited / "07.txt").write_text("an edited document on one node")
    text = outcome(tmp_path, "text", **({"data__files": f"{edited}/*.txt"} if rank else {}))
    assert "RecipeError: ranks were started differently: digest of the text of data.files is " in text
    facts = start.start_facts

    def other(recipe: Any) -> dict[str, str]:
        changed = {"version of torch": "0.0", "source file titan_muon/trainer/fault.py": "other"}
        return {**facts(recipe), **(changed if rank else {})}

    with mock.patch("titan_muon.trainer.run.job.start_facts", other):
        text = outcome(tmp_path, "code")
    assert "version of torch is " in text
    assert "source file titan_muon/trainer/fault.py is " in text
    assert not list((tmp_path / "runs").rglob("recipe.toml"))


ERRORS = {"refusal": OSError("disk full"), "not pickled": OptionError("w", "is unpicklable")}


@on_ranks(2)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_rank_0_reaches_every_rank(rank: int, name: str) -> None:
    """Otherwise the other ranks would wait in the broadcast."""
    kinds = {"refusal": (RecipeError, RecipeError), "not pickled": (OptionError, RuntimeError)}
    with pytest.raises(kinds[name][rank], match=str(ERRORS[name])):
        by_rank_0(mock.Mock(side_effect=ERRORS[name]), "runs", dist.group.WORLD)


Change = Callable[..., Any]
Faulty = Callable[[int], AbstractContextManager[Any]]
"""The fault of a rank, as a context."""


def patched(owner: Any, method: str, wrap: Change, *, ranks: Collection[int] = (0, 1)) -> Faulty:
    """`method` of a class replaced by `wrap(original, self, ...)` on some ranks."""
    original = getattr(owner, method)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(original, self, *args, **kwargs)

    return lambda rank: mock.patch.object(owner, method, replacement) if rank in ranks else nullcontext()


on_rank_1 = partial(patched, ranks=[1])


def gradients(change: Callable[[Any], None], *, ranks: Collection[int] = (1,)) -> Faulty:
    def clip(original: Change, trainer: Any) -> torch.Tensor:
        change(trainer)
        return original(trainer)

    return patched(MuonTrainer, "_clip_gradients", clip, ranks=ranks)


def first_rank(original: Change, loader: Any, config: Any, **kwargs: Any) -> None:
    original(loader, config, **{**kwargs, "dp_rank": 0})


def skips(original: Change, loader: Any, numbers: range) -> Any:
    if loader._read > 8:
        loader._read += 64
    return original(loader, numbers)


def beyond(original: Change, loader: Any, state: Any) -> None:
    original(loader, {**state, "blocks": state["blocks"] + 64})


def no_loss(original: Change, metrics: Any, loss: float, step: int) -> None:
    original(metrics, float("nan"), step)


def added(name: str, value: float, *, step: int = 2) -> Callable[[Any], None]:
    """Add `value` to the first element of a tensor of the model, in a step."""

    def change(trainer: Any) -> None:
        if trainer.step == step:
            local(attrgetter(name)(trainer.model_parts[0])).detach().view(-1)[0] += value

    return change


def after_the_clip(original: Change, trainer: Any) -> Any:
    norm = original(trainer)
    added("layers.1.attention.wo.weight.grad", nan)(trainer)
    return norm


REPLICAS = {"parallelism__data_parallel_replicate_degree": 2, "debug__check_replicas_freq": 2}
SAVED = {"checkpoint__enable": "true", "checkpoint__freq": 1, "checkpoint__keep_latest_k": 2}
RARE = {**SAVED, "checkpoint__freq": 2, "metrics__log_freq": 10}
MOE = {"model__name": "qwen3", "model__flavor": "moe_tiny"}
RESUMED = {**RARE, "name": "healthy", "checkpoint__load": "latest", "training__steps": 5}
VALIDATED = {"validator__enable": "true", "validator__freq": 2}
NO_LOSS = "FloatingPointError: step 2: the loss on the held-out text"
SKIPPABLE = (
    "FloatingPointError: layers.1.attention.wo.weight: gradient or momentum was not finite",
    "(muon.expert.on_bad_gradient = 'skip_step')",
)
MISMATCH = "RunFault: step 2: values that must be equal on ranks differ: layers.1."
NOT_FINITE = added("tok_embeddings.weight.grad", nan)
SKIPS = {"metrics__log_freq": 10, "muon__expert__on_bad_gradient": "skip_step"}
NAN = "FloatingPointError: step 2: the norm of the gradients is nan"


@contextlib.contextmanager
def read_late(rank: int) -> Iterator[None]:
    """A NaN as on a GPU, where the host reads the norm after the step."""
    with mock.patch("titan_muon.trainer.checks.training.is_host", return_value=False), gradients(NOT_FINITE)(rank):
        yield


# A fault, options of the run, and words of the output.
FAULTS: dict[str, tuple[Faulty, dict[str, object], tuple[str, ...]]] = {
    "healthy": (nullcontext, RARE, ()),
    "equal": (nullcontext, REPLICAS, ()),
    "twins": (patched(PackedDataLoader, "__init__", first_rank), {}, ("step 1: rank 1 read block 0 instead of 2",)),
    "skips": (on_rank_1(PackedDataLoader, "_make_batch", skips), {"training__steps": 4}, ("rank 1 read block",)),
    "nan": (gradients(NOT_FINITE), RARE, (NAN, "tok_embeddings.weight on rank 1")),
    "nan, read late": (read_late, RARE, (NAN, "tok_embeddings.weight on rank 1")),
    "passed over": (gradients(NOT_FINITE), SKIPS, ("",)),
    # The last step, which no later step checks, and no save. The text has the recipe's key, not Muon's keyword.
    "after the clip": (on_rank_1(MuonTrainer, "_clip_gradients", after_the_clip), {"training__steps": 2}, SKIPPABLE),
    "held out": (patched(RunMetrics, "log_validation", no_loss), VALIDATED, (f"{NO_LOSS} is not finite",)),
    "drift": (gradients(added("layers.1.attention.wo.weight", 1e-6)), REPLICAS, (f"{MISMATCH}attention.wo.weight",)),
    "bias": (gradients(added("layers.1.moe.expert_bias_E", 1)), {**REPLICAS, **MOE}, (f"{MISMATCH}moe.expert_bias_E",)),
    "position": (
        patched(PackedDataLoader, "load_state_dict", beyond),
        RESUMED,
        ("stands +4096 tokens from where step 3",),
    ),
}


@pytest.mark.slow
@on_ranks(2, timeout=400)
def test_faults_in_a_step_are_named(rank: int, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for name, (fault, values, words) in FAULTS.items():
        shown = outcome(tmp_path, name, fault(rank), **values)
        assert [part for part in words if part not in shown] == [], shown
        assert words or not re.search("warning|Error|Fault", shown), shown
        assert ("FloatingPointError" in shown) == any("FloatingPointError" in part for part in words), shown
    for name in ("nan", "nan, read late"):
        assert not list((tmp_path / "runs" / name).rglob("step-*")), "nothing may be saved from a step with NaN"


@pytest.mark.slow
@on_ranks(2, timeout=400)
def test_damaged_checkpoints_are_skipped_and_a_full_disk_is_named(rank: int, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    saved = {**SAVED, "checkpoint__keep_latest_k": 0}
    resumed = {**saved, "checkpoint__load": "latest", "training__steps": 4}
    outcome(tmp_path, "run", **saved)
    (steps,) = (tmp_path / "runs" / "run").glob("*/checkpoint")

    def damage(change: Callable[[], object]) -> None:
        dist.barrier()
        if rank == 0:
            change()
        dist.barrier()

    newest = steps / "step-3" / "__1_0.distcp"
    damage(lambda: newest.write_bytes(b"\0" * newest.stat().st_size))
    damage(lambda: shutil.copy(steps / "step-1" / "__1_0.distcp", steps / "step-2" / "__1_0.distcp"))
    text = outcome(tmp_path, "run", **resumed)
    if rank == 0:
        for step in (3, 2):
            assert f"step-{step} is passed over: __1_0.distcp has other bytes than were saved" in text
        assert "continuing after step 1" in text

    poison = gradients(added("layers.1.attention.wo.weight", 2.0**100, step=5))
    text = outcome(tmp_path, "run", poison(rank), **{**resumed, "training__steps": 5})
    assert not (steps / "step-5").exists()
    if rank == 0:
        assert "continuing after step 4" in text
        assert "step 5: weights are not finite or larger than 1e+06 (layers.1.attention.wo.weight on rank 1)" in text

    flipped = steps / "step-4" / ".metadata"
    damage(lambda: flipped.write_bytes(flipped.read_bytes()[:-9] + b"\1" + flipped.read_bytes()[-8:]))
    text = outcome(tmp_path, "run", **{**resumed, "checkpoint__load_step": 4, "training__steps": 5})
    assert "RecipeError: checkpoint.load_step = 4" in text
    assert ".metadata has other bytes than were saved" in text

    def removed(trainer: Any) -> None:
        if trainer.step == 3:
            shutil.rmtree(trainer.checkpointer.folder)

    text = outcome(tmp_path, "removed", gradients(removed, ranks=[0])(rank), **saved)
    assert rank or "was removed; checkpoints up to step 2 are gone" in text
    assert [path.name for path in (tmp_path / "runs" / "removed").rglob("step-*")] == ["step-3"]

    def no_space(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
        raise OSError(28, "No space left on device")

    broken = patched(SummingWriter, "write_data", no_space, ranks=[1])
    for mode in ("disabled", "async"):
        text = outcome(tmp_path, mode, broken(rank), **saved, checkpoint__async_mode=mode)
        assert "RunFault: step 1 is not saved in " in text
        assert "No space left on device); no whole checkpoint is left. Free space or " in text
