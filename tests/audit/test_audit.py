"""The audit of training scripts: verdicts, the command, unchanged training, and ranks that step unequally."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.audit.trainers import KINDS, STEPS, Net, Run, TinyMuon, audited, batch, groups, plain, sharded
from tests.dist.harness import World, run_program, run_ranks
from titan_muon import Hybrid
from titan_muon.audit import Audit, watch
from titan_muon.audit.report import REMEDIES

QUICK = ("own Muon", "accumulation", "flat buffers", "no Newton-Schulz", "Newton-Schulz in each pass",
         "other momentum", "decay in the gradient", "orthogonalized twice", "matrices not updated", "FSDP2, Hybrid",
         "owned matrices", "heads",
         "updates in the next forward", "weights overwritten after a load", "shards orthogonalized, 2 ranks",
         "replicas drift")  # fmt: skip


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size, quiet=True) for size in (1, 2, 4)}
    yield made
    for world in made.values():
        world.close()


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


def test_every_code_has_a_wrong_trainer() -> None:
    assert {kind.code for kind in KINDS} - {""} == set(REMEDIES)


def weights_after(rank: int, size: int, audit: bool) -> list[torch.Tensor]:
    run = Run(1, rank, size, "")
    model = run.net() if size == 1 else sharded(run)
    optimizer = TinyMuon(groups(model)) if size == 1 else Hybrid(model, lr=0.01, weight_decay=0.1)
    with Audit() if audit else nullcontext() as watched:
        run.train(model, optimizer, steps=20)
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
        (["--allow", "nesterov:layers.*"], "nesterov", 0, 0, "allowed nesterov"),
        (["--allow", "nesterov:embed*"], "nesterov", 0, 1, "FINDING nesterov"),
        (["--steps", "1"], "", 0, 2, "--steps: momentum shows in at least 2 steps"),
        (["--allow", "speed"], "", 0, 2, "--allow: speed is not one of sgd"),
    ],
)
def test_the_command_keeps_the_script_and_its_exit_code(
    words: list[str], bug: str, script_code: int, code: int, text: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = "import sys; from titan_muon.command import main; sys.exit(main(sys.argv[1:]))"
    launcher = tmp_path / "launch.py"
    launcher.write_text(f"import sys\nsys.path.insert(0, {str(Path.cwd())!r})\n{program}\n")
    found, output = run_program(str(launcher), "audit", *words, str(script), bug, str(script_code))
    assert found == code, output
    assert text in output
    assert (f"output [{bug!r}, '{script_code}']" in output) == (code != 2)


def test_hooks_are_gone_after_the_audited_steps() -> None:
    before = torch.optim.Optimizer.__init__, torch.save, torch.load
    model = Net(0)
    with watch(model) as audit:
        optimizer = TinyMuon(groups(model))
        for step in range(STEPS):
            model(batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (audit.report is None) == (step < 4)
            assert bool(model.layers[0].q.weight._backward_hooks) == (step < 4)
    assert (torch.optim.Optimizer.__init__, torch.save, torch.load) == before


def uneven(rank: int, size: int) -> str:
    """Rank 1 never steps the audited optimizer, as where a rank has no parameter of it."""
    audit = Audit(limit=1.0)
    run = Run(0, rank, 1, "")
    model = run.net()
    optimizer = TinyMuon(groups(model))
    if rank == 0:
        with audit:
            run.train(model, optimizer)
    return str(audit.report)


def test_a_rank_that_does_not_come_is_named_within_the_limit() -> None:
    assert "rank 1: did not come to the comparison within 1 s" in run_ranks(uneven, 2, timeout=60)[0]


def test_matrices_over_the_memory_limit_are_named() -> None:
    with Audit(memory=50_000) as audit:
        with torch.device("meta"):
            kept = nn.Linear(24, 24)  # A model without storage, as scripts keep one to count parameters.
        plain(Run(0, 0, 1, ""))
    assert kept.weight.is_meta
    assert ("larger than the memory limit of the audit") in str(audit.report)


def test_undecided_updates_are_named() -> None:
    """The sign of the momentum is neither Muon nor Adam nor SGD."""

    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sign(), alpha=0.01)

    torch.manual_seed(0)
    model = nn.Linear(24, 24, bias=False)
    with watch(model) as audit:
        optimizer = Signs(model.parameters(), {"lr": 0.01})
        for _ in range(STEPS):
            model(torch.randn(64, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.report is not None
    assert audit.report.codes == []
    assert [names for names, _ in audit.report.undecided] == ["weight"]


def test_parameters_without_elements_between_their_uses_are_named() -> None:
    """DeepSpeed's ZeRO-3 empties parameters before and after the step."""
    torch.manual_seed(0)
    model = nn.Linear(24, 24, bias=False)
    whole, empty = model.weight.detach().clone(), torch.empty(0)
    with watch(model) as audit:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(STEPS):
            model.weight.data = whole
            model(torch.randn(64, 24)).square().mean().backward()
            gradient, model.weight.grad = model.weight.grad, None
            whole = whole - 0.01 * gradient
            model.weight.data = empty
            optimizer.step()
    assert audit.report is not None
    assert audit.report.codes == []
    assert [(names, "ZeRO-3" in why) for names, why in audit.report.undecided] == [("weight", True)]


def test_the_audit_needs_torch_alone() -> None:
    code = (
        "import sys, titan_muon.audit; print(sorted(m for m in sys.modules if m.startswith(('einops', 'titan_muon'))))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(output) == [
        "titan_muon", "titan_muon.audit", "titan_muon.audit.checkpoints", "titan_muon.audit.judge",
        "titan_muon.audit.ranks", "titan_muon.audit.report", "titan_muon.audit.watch",
    ]  # fmt: skip
