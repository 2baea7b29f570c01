"""The audit of training scripts: verdicts, the command, unchanged training, and ranks that step unequally."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.audit.trainers import KINDS, STEPS, Run, audited, batch, hybrid, plain, sharded, tiny
from tests.dist.harness import World, run_program, run_ranks
from titan_muon.audit import Audit, Report, watch
from titan_muon.audit.report import REMEDIES

QUICK = ("own Muon", "accumulation", "flat buffers", "no Newton-Schulz", "Newton-Schulz in each pass",
         "other momentum", "decay in the gradient", "orthogonalized twice", "matrices not updated", "FSDP2, Hybrid",
         "owned matrices", "heads",
         "updates in the next forward", "weights overwritten after a load", "shards orthogonalized, 2 ranks",
         "replicas drift")  # fmt: skip


@pytest.mark.parametrize(
    ("number", "seed"),
    [
        pytest.param(
            number, seed, id=f"{kind.name}-{seed}", marks=() if kind.name in QUICK and seed == 0 else pytest.mark.slow
        )
        for number, kind in enumerate(KINDS)
        for seed in range(3)
    ],
)
def test_right_trainers_have_no_finding_and_wrong_ones_their_code(
    number: int, seed: int, worlds: dict[int, World], tmp_path: Path
) -> None:
    kind = KINDS[number]
    for codes, text, _ in worlds[kind.ranks].run(audited, number, seed, str(tmp_path)):
        assert codes == ([kind.code] if kind.code else []), text
        assert "made no step" not in text, text


def test_every_code_has_a_wrong_trainer() -> None:
    assert {kind.code for kind in KINDS} - {""} == set(REMEDIES)


def weights_after(rank: int, size: int, audit: bool) -> list[torch.Tensor]:
    run = Run(1, rank, size, "")
    model, make = (run.model, tiny) if size == 1 else (sharded(run), hybrid)
    with Audit() if audit else nullcontext() as watched:
        run.train(*make(run), steps=20)
    if audit:
        assert watched.report.codes == []
    return [p.to_local() if size > 1 else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_bitwise_those_without_an_audit(size: int, worlds: dict[int, World]) -> None:
    for with_, without in zip(*(worlds[size].run(weights_after, audit) for audit in (True, False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))


SCRIPT = """
import sys
from tests.audit.trainers import Run, plain
print("output", sys.argv[1:])
plain(Run(0, 0, 1, "", sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("words", "bug", "script_code", "code", "text"),
    [
        ([], "", 0, 0, "0 findings"),
        ([], "sgd", 0, 1, "FINDING sgd: layers.*.q.weight (2)"),
        ([], "", 3, 3, "0 findings"),
        (["--allow", "nesterov"], "nesterov", 0, 0, "allowed nesterov"),
        (["--steps", "1"], "", 0, 2, "--steps: momentum shows in at least 2 steps"),
        (["--allow", "speed"], "", 0, 2, "--allow: invalid choice: 'speed'"),
    ],
)
def test_the_command_keeps_the_script_and_its_exit_code(
    words: list[str], bug: str, script_code: int, code: int, text: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = "import sys; from titan_muon.command import main; sys.exit(main(sys.argv[2:]))"
    found, output = run_program("-c", program, "audit", *words, str(script), bug, str(script_code))
    assert found == code, output
    assert text in output
    assert (f"output [{bug!r}, '{script_code}']" in output) == (code != 2)


def replaced() -> tuple[object, ...]:
    return torch.autograd.backward, torch.save, torch.load, dist.destroy_process_group


def test_hooks_are_gone_after_the_audited_steps() -> None:
    before, steps = replaced(), list[object]()
    run = Run(0, 0, 1, "")
    with watch(run.model) as audit, ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer)).remove)
        (optimizer,) = tiny(run)
        for step in range(STEPS):
            run.model(batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (audit.report is None) == (step < 4)
            assert bool(run.model.layers[0].q.weight._backward_hooks) == (step < 4)
    assert len(steps) == STEPS
    assert replaced() == before


def uneven(rank: int, size: int) -> str:
    """Rank 1 never steps, and ends when rank 0 has gone on."""
    run = Run(0, rank, 1, "")
    with Audit(limit=1.0) as audit:
        if rank == 0:
            plain(run)
        else:
            dist.barrier()
    if rank == 0:
        dist.barrier()
    return str(audit.report)


def test_a_late_rank_is_named_within_the_limit_and_no_rank_waits_for_others_that_went_on() -> None:
    for text in run_ranks(uneven, 2, timeout=60):
        assert "undecided: rank 1: did not come to the comparison within 1 s" in text


def over_the_limit(rank: int, size: int) -> Report:
    # In a process of its own, because models of other tests would have the names.
    with Audit(memory=50_000) as audit:
        with torch.device("meta"):
            kept = nn.Linear(24, 24)  # A model without storage, as scripts keep one to count parameters.
        plain(Run(0, rank, size, ""))
    assert kept.weight.is_meta
    return audit.report


def with_a_linear(step: Callable[..., None]) -> Report:
    """The report on a trainer of one matrix, whose step gets the weight and the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(24, 24, bias=False)
    with watch(model) as audit:
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            model(torch.randn(64, 24)).square().mean().backward()
            step(model.weight, made)
            model.zero_grad()
    return audit.report


def signs(weight: torch.Tensor, optimizer: Any) -> None:
    """The sign of the gradient is neither Muon nor Adam nor SGD."""
    optimizer.step()
    weight.data.add_(weight.grad, alpha=0.01).sub_(weight.grad.sign(), alpha=0.01)


def emptied(weight: torch.Tensor, optimizer: Any) -> None:
    """DeepSpeed's ZeRO-3 empties parameters before and after the step."""
    whole, gradient, weight.grad, weight.data = weight.data, weight.grad, None, torch.empty(0)
    optimizer.step()
    weight.data = whole - 0.01 * gradient


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            lambda: run_ranks(over_the_limit, 1)[0],
            "layers.*.up.weight (2), layers.*.down.weight (2): larger than the memory limit of the audit",
        ),
        (partial(with_a_linear, signs), "weight: a variant of Muon"),
        (partial(with_a_linear, emptied), "weight: its shape changed, as under ZeRO-3"),
        (partial(with_a_linear, lambda weight, _: weight.data.mul_(0.9)), "weight: its optimizer made no step"),
        (
            partial(with_a_linear, lambda weight, step: step.step() or weight.data.fill_(float("nan"))),
            "weight: weights or gradients are not finite",
        ),
    ],
)
def test_what_the_audit_cannot_decide_is_named(run: Callable[[], Report], text: str) -> None:
    report = run()
    assert report.codes == []
    assert f"undecided: {text}" in str(report)


def test_the_audit_needs_torch_alone() -> None:
    code = "import sys, titan_muon.audit; print(*(m for m in sys.modules if m.startswith(('einops', 'titan_muon'))))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    parts = {f"titan_muon.audit.{part}" for part in ("judge", "ranks", "report", "watch")}
    assert set(output.split()) == {"titan_muon", "titan_muon.audit", *parts}
