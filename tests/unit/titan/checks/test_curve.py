"""Loss curves that look wrong are named; curves of healthy runs, with odd batches, are not."""

import random

from titan_muon.titan.checks.curve import Curve, Report, reports_of


def healthy(count: int, seed: int = 0) -> list[Report]:
    """Reports of a run whose loss falls from 5.6 to 1.8 with noise; one batch in 60 is odd, as in a small recipe."""
    draw = random.Random(seed)
    reports = []
    for step in range(1, count + 1):
        loss = 1.8 + 3.8 * 0.97**step + draw.gauss(0, 0.15) + (1.8 if step % 60 == 7 else 0)
        reports.append(Report(step, loss, draw.lognormvariate(0.4, 0.4) * (4 if step % 60 == 7 else 1)))
    return reports


def warnings(curve: Curve, reports: list[Report]) -> list[str]:
    return [line for report in reports for line in curve.add(report)]


def test_healthy_curves_say_nothing() -> None:
    """1,000 reports with an odd batch now and then, of 20 runs."""
    for seed in range(20):
        curve = Curve()
        assert warnings(curve, healthy(1000, seed)) == []
        assert curve.sound_until is None


def test_dead_gradients_are_named_at_once_and_once() -> None:
    curve = Curve()
    warnings(curve, healthy(20))
    lines = warnings(curve, [Report(step, 5.5, 0.0) for step in range(21, 30)])
    assert lines[0] == "step 21: the norm of all gradients is 0, so that nothing is learned"
    assert sum("norm of all gradients" in line for line in lines) == 1
    assert curve.sound_until == 20
    tiny = Curve(healthy(20))
    assert "fell to 1.00e-08, from a median of" in tiny.add(Report(21, 2.0, 1e-8))[0]
    assert "rose to 4.88e+03, from a median of" in tiny.add(Report(22, 2.0, 4883.0))[0]


def test_a_jump_that_stays_is_named_after_three_reports_and_its_end_is_said() -> None:
    curve = Curve()
    warnings(curve, healthy(100))
    assert warnings(curve, [Report(101, 5.5, 1.0), Report(102, 5.5, 1.0)]) == []
    assert curve.sound_until == 100, "no checkpoint of a doubtful step may replace a good one"
    (line,) = curve.add(Report(103, 5.5, 1.0))
    assert line.startswith("step 103: the loss is 5.5000 and was above ")
    assert warnings(curve, [Report(104, 5.5, 1.0)]) == []
    assert warnings(curve, [Report(105, 2.0, 1.0)]) == ["step 105: loss and gradient norm look as before again"]
    assert curve.sound_until is None


def test_an_odd_batch_leaves_no_trace() -> None:
    curve = Curve(healthy(100))
    assert warnings(curve, [Report(101, 4.0, 4.0), Report(102, 1.9, 1.0)]) == []
    assert curve.sound_until is None


def test_losses_far_from_those_before_a_checkpoint_are_named() -> None:
    """Weights that were not loaded: the loss is the one of a new model."""
    curve = Curve(healthy(60))
    lines = warnings(curve, [Report(61, 5.66, 9.0), Report(62, 5.6, 9.0)])
    assert any(
        "since the checkpoint of step 60 the loss is 5.6000, and the median before was" in line for line in lines
    )


def test_reports_are_read_from_records_of_a_metrics_file() -> None:
    records = [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0},
        {"step": 1, "val_loss": 2.0},
        {"step": 2, "loss": float("nan"), "grad_norm": 1.0},
        {"step": 3, "diverged": "reason"},
    ]
    assert reports_of(records) == [Report(1, 2.0, 1.0)]
