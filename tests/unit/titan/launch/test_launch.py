"""Start, mutual watch and exclusion of a job's processes: stores in memory, ranks as threads; checks of a training."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dist.harness import run_program
from titan_muon.plugins.clip import NormCheck
from titan_muon.trainer.checks.start import differences, source_files, start_facts
from titan_muon.trainer.checks.training import ExpertLoads, TrainingChecks, check_places
from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.launch import attempts
from titan_muon.trainer.launch.attempts import describe_world, store_of_attempt, store_of_ranks
from titan_muon.trainer.launch.watchdog import Heartbeat, Watchdog, late_ranks
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.run_folder import LOCK_FILE, FolderLock

SHORT = timedelta(seconds=20)
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}


def test_a_launchers_environment_is_kept_and_several_srun_tasks_without_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has the right command; a single task trains, and listens on no port."""
    launched = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "8"}
    monkeypatch.setattr(os, "environ", dict(launched))
    describe_world()
    assert os.environ == launched
    monkeypatch.setattr(os, "environ", {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"})
    with pytest.raises(RecipeError, match=r"srun started 8 tasks.*torchrun --nnodes"):
        describe_world()
    os.environ["SLURM_STEP_NUM_TASKS"] = "1"
    describe_world()
    assert set(os.environ) >= LAUNCHER
    assert os.environ["WORLD_SIZE"] == "1"
    assert isinstance(store_of_ranks(SHORT), dist.HashStore)


def attempt(lasting: dist.Store, world_size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(store_of_attempt, lasting, r, world_size, SHORT) for r in reversed(range(world_size))]
        return [future.result() for future in futures]


def test_an_attempt_does_not_read_keys_of_an_earlier_attempt() -> None:
    """All ranks of an attempt share a store. Killed ranks of an attempt without rank 0 do not count."""
    lasting = dist.HashStore()
    dist.PrefixStore("titan_muon/attempts", lasting).add("arrivals", 1)
    first, second = attempt(lasting, 3), attempt(lasting, 3)
    first[0].set("address", "dead")
    assert all(store.get("address") == b"dead" for store in first)
    assert not any(store.check(["address"]) for store in second)
    second[1].set("address", "new")
    assert all(store.get("address") == b"new" for store in second)


@pytest.mark.parametrize(("rank", "problem"), [(0, r"ranks \[1, 2\] have"), (1, "rank 0 has")])
def test_the_timeout_names_missing_ranks(rank: int, problem: str) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match=f"{problem} not arrived"):
        store_of_attempt(store, rank, 3, timedelta(seconds=0.1))


def test_the_next_attempt_finds_the_run_in_an_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = dist.HashStore()
    assert attempts.interrupted_run(lasting) is None
    attempts.remember_run(lasting, "/runs/tiny/1")
    assert attempts.interrupted_run(lasting) == "/runs/tiny/1"
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert attempts.lasting_store(SHORT) is None, "no other store outlasts the job"


HEARTBEAT, SECOND = Heartbeat(host="node-a", pid=7, stage=5, beat=9), "rank 1 (process 7 on node-a)"


@pytest.mark.parametrize(
    ("second", "silent", "expected"),
    [
        (HEARTBEAT, {}, ""),
        (HEARTBEAT, {1}, f"{SECOND} gives no sign of life"),
        (replace(HEARTBEAT, stage=4), {}, f"{SECOND} has not begun step 3 of this attempt"),
        (replace(HEARTBEAT, stage=3), {}, f"{SECOND} has not ended step 2 of this attempt"),
        (replace(HEARTBEAT, stage=3, ended=True), {}, ""),
        (None, {}, "rank 1 has not come up"),
    ],
)
def test_late_ranks_are_named(second: Heartbeat | None, silent: set[int], expected: str) -> None:
    heartbeats = {0: HEARTBEAT} if second is None else {0: HEARTBEAT, 1: second}
    assert late_ranks(heartbeats, silent, 2) == expected


def stop(*ranks: Watchdog) -> None:
    for rank in ranks:
        rank._closed.set()
        rank._thread.join()


def test_a_silent_rank_is_named_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    ranks = [Watchdog(store, rank, 3, first_timeout=2, timeout=2) for rank in range(3)]
    monkeypatch.setattr(Watchdog, "_heartbeat", lambda self: Heartbeat("h", 100 + self._rank, self._stage, self._beat))
    ranks[2]._report()
    with pytest.raises(RuntimeError, match="timed out"), ranks[0], ranks[1]:  # noqa: PT012 (the test is about the wait)
        time.sleep(2.2)
        raise RuntimeError("a collective that timed out")
    stop(*ranks[:2])
    shown = capfd.readouterr().err
    assert shown.count("rank 2 (process 102 on h) gives no sign of life") == 1
    assert "rank 0 (" not in shown


def test_a_rank_that_ended_is_named_by_a_rank_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """torchrun names no process that ended with 0."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store = dist.HashStore()
    first, second = (Watchdog(store, rank, 2, first_timeout=9, timeout=9) for rank in range(2))
    second._send(Heartbeat(socket.gethostname(), ended.pid, 4, 1))
    with pytest.raises(RuntimeError), first:
        raise RuntimeError("Connection closed by peer")
    stop(first)
    assert f"error: rank 1 (process {ended.pid} on {socket.gethostname()}) ended" in capfd.readouterr().err


def test_the_first_timeout_lasts_until_the_end_of_the_first_step() -> None:
    rank = Watchdog(dist.HashStore(), 0, 2, first_timeout=9, timeout=2)
    limits = [(rank.timeout, rank.advance())[0] for _ in range(4)]
    assert limits == [9, 9, 2, 2], "before, in and after the first step, and in the second"


HOLD = """
import sys, time
from titan_muon.trainer.run_folder import FolderLock
lock = FolderLock()
lock.take(sys.argv[1])
print("taken", flush=True)
time.sleep(60)
"""


def test_a_second_job_in_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder, FolderLock() as lock:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(RecipeError, match=rf"in use by process {holder.pid} on "):
            lock.take(str(tmp_path))
        holder.kill()
    with FolderLock() as lock:
        lock.take(str(tmp_path))
        assert f"process {os.getpid()} on " in (tmp_path / LOCK_FILE).read_text()


def test_a_file_system_without_locks_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example Lustre without flock: the user learns of the missing protection."""

    monkeypatch.setattr("fcntl.lockf", mock.Mock(side_effect=OSError(38, "Function not implemented")))
    with FolderLock() as lock:
        lock.take(str(tmp_path))
    shown = capsys.readouterr().out
    assert shown.startswith(f"warning: {tmp_path} cannot be locked")
    assert "second job" in shown


def test_an_unexpected_error_ends_the_process_with_exit_code_1() -> None:
    """Even if the exit would wait for a peer, here for a thread."""
    code, shown = run_program(
        "-c",
        """
import threading
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.run import job

def fail(*_):
    threading.Thread(target=threading.Event().wait).start()
    raise ZeroDivisionError

job._init_distributed, job.train = lambda recipe: None, fail
job.SECONDS_TO_EXIT = 1
job.run(Recipe(), {})
""",
    )
    assert code == 1
    assert "ZeroDivisionError" in shown


# Messages about differences between ranks and experts without tokens


def test_differences_names_every_value_and_the_ranks() -> None:
    reports = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "3"}]
    assert differences(reports) == ["b is 2 on rank 0 and 3 on ranks 1, 3 and absent on rank 2"]


def test_start_facts_have_recipe_versions_and_sources() -> None:
    import models  # noqa: F401 (registers the families)

    facts = start_facts(Recipe())
    assert (facts["adamw.lr"], facts["version of torch"]) == ("0.001", torch.__version__)
    assert {"titan_muon/muon.py", "models/qwen3.py"} <= {"/".join(name.split("/")[-2:]) for name in facts}
    assert sum(name.startswith("source file ") for name in facts) == len(source_files(Recipe()))


def checks_of(model: nn.Module) -> TrainingChecks:
    device = torch.device("cpu")
    return TrainingChecks([], [model], device, group=None, token_group=None, tolerates_nonfinite=False)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_thawed_in_training_is_named_before_backward(trained: bool) -> None:
    """On one rank alone, FSDP would abort in a collective without a name."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.requires_grad_(trained)
    checks = checks_of(model)
    checks.begin_step(None)
    model[0].bias.requires_grad_(not trained)
    with pytest.raises(ValueError, match=r"^0\.bias: requires_grad changed after the start of training; "):
        checks.begin_step(None)


def test_a_rank_at_a_wrong_place_in_the_text_is_named() -> None:
    check_places(5, (8, 8), None)
    with pytest.raises(RunFault, match="step 5: rank 0 read block 12 instead of 10"):
        check_places(5, (12, 10), None)


def test_dead_experts_are_reported_once_until_the_next_token() -> None:
    """No token in the reports of 100 steps. Counts are per step, because the buffers may not be cleared."""
    layer = nn.Module()
    layer.register_buffer("tokens_per_expert_E", torch.zeros(4))
    loads = ExpertLoads([nn.Sequential(layer)], None, torch.device("cpu"))
    lines = {}
    for step in range(10, 400, 10):
        loads.begin_step()
        layer.tokens_per_expert_E += torch.tensor([5.0, 3.0, 0.0, 4.0 if step < 200 else 0.0])
        tokens = loads.of_step()
        assert tokens["0"][0] == 5
        if dead := loads.dead(step, tokens):
            lines[step] = dead
    silent = "got no token in any report of the last 100 steps"
    assert lines == {110: [f"0: experts 2 {silent}"], 300: [f"0: experts 3 {silent}"]}


def test_the_causes_of_a_nonfinite_norm_are_reported_once() -> None:
    assert NormCheck(torch.tensor(1.0), ["a", "b"], torch.tensor([1.0, 0.0])).causes() is None
    norm = NormCheck(torch.tensor(float("nan")), ["a", "b"], torch.tensor([1.0, float("nan")]))
    assert norm.causes() == "b on rank 0"
    assert norm.causes() is None
    assert NormCheck(torch.tensor(float("inf")), ["a", "b"], torch.tensor([1e38, 1e38])).causes() == "large values"


@pytest.mark.parametrize("tolerates", [False, True])
def test_a_nonfinite_norm_ends_a_run_that_does_not_skip_steps(tolerates: bool) -> None:
    checks = checks_of(nn.Linear(2, 2))
    checks.tolerates_nonfinite = tolerates
    norm = NormCheck(torch.tensor(float("nan")), ["a"], torch.tensor([float("nan")]))
    if tolerates:
        (line,) = checks.after_clip(3, norm)
        assert line.startswith("step 3: the norm of the gradients is nan, because of a on rank 0")
    else:
        with pytest.raises(FloatingPointError, match=r"step 3: .* a on rank 0; nothing is saved from this step"):
            checks.after_clip(3, norm)
