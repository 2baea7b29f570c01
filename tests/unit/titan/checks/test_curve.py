"""Suspicious loss curves are named; curves of healthy runs with outlier batches are not."""

import random

from titan_muon.titan.checks.curve import Curve, Report, reports_of


def healthy(count: int, seed: int = 0) -> list[Report]:
    """Reports of a run with a loss from 5.6 to 1.8 and noise; a batch in 60 is odd."""
    draw = random.Random(seed)
    reports = []
    for step in range(1, count + 1):
        loss = 1.8 + 3.8 * 0.97**step + draw.gauss(0, 0.15) + (1.8 if step % 60 == 7 else 0)
        reports.append(Report(step, loss, draw.lognormvariate(0.4, 0.4) * (4 if step % 60 == 7 else 1)))
    return reports


def warnings(curve: Curve, reports: list[Report]) -> list[str]:
    return [line for report in reports for line in curve.add(report)]


def test_healthy_curves_cause_no_warning() -> None:
    """1,000 reports with an odd batch now and then, of 20 runs."""
    for seed in range(20):
        curve = Curve()
        assert warnings(curve, healthy(1000, seed)) == []


def test_a_noisy_loss_is_not_high() -> None:
    """Losses of 0.5 to 1.5 have a median absolute deviation of 0.25, and a limit of 3."""
    curve, draw = Curve(), random.Random(0)
    warnings(curve, [Report(step, draw.uniform(0.5, 1.5), 1.0) for step in range(1, 60)])
    assert warnings(curve, [Report(step, 1.9, 1.0) for step in range(60, 80)]) == []
    assert "was above" in warnings(curve, [Report(step, 4.0, 1.0) for step in range(80, 100)])[0]


def test_dead_gradients_are_reported_immediately_and_once() -> None:
    curve = Curve()
    warnings(curve, healthy(20))
    lines = warnings(curve, [Report(step, 5.5, 0.0) for step in range(21, 30)])
    assert lines[0] == "step 21: the norm of all gradients is 0, so that nothing is learned"
    assert sum("norm of all gradients" in line for line in lines) == 1
    assert curve.sound_until == 20
    tiny = Curve(healthy(20))
    assert "fell to 1.00e-08, from a median of" in tiny.add(Report(21, 2.0, 1e-8))[0]
    assert "rose to 4.88e+03, from a median of" in tiny.add(Report(22, 2.0, 4883.0))[0]


def test_a_lasting_jump_is_reported_after_ten_reports_and_at_the_end() -> None:
    curve = Curve()
    warnings(curve, healthy(100))
    assert warnings(curve, [Report(step, 5.5, 1.0) for step in range(101, 110)]) == []
    assert curve.sound_until == 100, "no checkpoint of a doubtful step may replace a good one"
    (line,) = curve.add(Report(110, 5.5, 1.0))
    assert line.startswith("step 110: the loss is 5.5000 and was above ")
    assert warnings(curve, [Report(111, 5.5, 1.0)]) == []
    assert warnings(curve, [Report(112, 2.0, 1.0)]) == ["step 112: loss and gradient norm look as before again"]
    assert curve.sound_until is None


def test_losses_far_from_losses_before_a_checkpoint_are_named() -> None:
    """Missing weights: the loss is a new model's."""
    curve = Curve(healthy(60))
    lines = warnings(curve, [Report(61, 5.66, 9.0), Report(62, 5.7, 9.0), Report(63, 5.6, 9.0)])
    (line,) = [line for line in lines if line.startswith("step 63")]
    assert "since the checkpoint of step 60 the loss is 5.6000, and the median before was" in line


def test_old_weights_in_a_young_run_are_named() -> None:
    """The window still has the first loss, which is as high as a new model's."""
    losses = (5.55, 5.1, 4.6, 4.2, 3.8, 3.6)
    curve = Curve(Report(step, loss, 1.0) for step, loss in zip((1, 4, 8, 12, 16, 20), losses, strict=True))
    lines = warnings(curve, [Report(24, 5.5, 1.0), Report(28, 5.4, 1.0), Report(32, 5.3, 1.0)])
    (line,) = lines
    assert line.startswith("step 32: since the checkpoint of step 20 the loss is 5.3000, and the median before was 3.8")


def test_resumes_of_young_healthy_runs_cause_no_warning() -> None:
    for seed in range(10):
        reports = healthy(70, seed)
        for resumed in range(1, 60, 3):
            assert warnings(Curve(reports[:resumed]), reports[resumed:]) == []


def test_training_is_as_before_only_with_a_loss_as_before() -> None:
    """After a step with gradients of zeros, the loss of a model that was reset is no recovery."""
    curve = Curve()
    losses = (5.55, 5.5, 5.4, 5.3, 5.2, 5.05)
    warnings(curve, [Report(step, loss, 1.0) for step, loss in enumerate(losses, start=1)])
    (line,) = warnings(curve, [Report(7, 5.05, 0.0), Report(8, 5.55, 1.0), Report(9, 5.5, 1.0)])
    assert line.startswith("step 7: the norm of all gradients is 0")
    assert curve.sound_until == 6
    assert warnings(curve, [Report(10, 5.1, 1.0)]) == ["step 10: loss and gradient norm look as before again"]
    assert curve.sound_until is None


def test_reports_are_read_from_records_of_a_metrics_file() -> None:
    records = [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0},
        {"step": 1, "val_loss": 2.0},
        {"step": 2, "loss": float("nan"), "grad_norm": 1.0},
        {"step": 3, "diverged": "reason"},
    ]
    assert reports_of(records) == [Report(1, 2.0, 1.0)]
