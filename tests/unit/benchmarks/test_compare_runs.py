"""scripts/compare_runs.py on synthetic runs: every section, the picture, and every error."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
# Python finds the neighbours of a script here.
sys.path.insert(0, str(SCRIPTS))

import compare_runs  # noqa: E402
from compare import run_folder, run_picture  # noqa: E402

RECIPE = """
[muon]
lr = {lr}
[training]
steps = 100
[[optimizer.rule]]
match = "*"
optimizer = "{optimizer}"
"""


def falling(end: float, scale: float, steps=range(1, 101)) -> list[dict]:
    """Training records with a loss from about 6 down to `end`; a step takes 40 ms."""
    time = {"forward_backward": 0.02, "clip": 0.004, "optimizer": 0.01, "step": 0.04}
    return [
        {"step": s, "loss": end + (6 - end) * math.exp(-s / scale), "seconds": s * 0.04, "time": time}
        | {"tokens_per_second": 1000 / scale, "lr": {"muon": 0.1}, "memory_gib": 1.5, "mfu": 0.4}
        for s in steps
    ]


def write_run(folder: Path, records: list[dict], *, lr: float = 0.01, optimizer: str = "muon") -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.format(lr=lr, optimizer=optimizer))
    lines = [json.dumps(record) + "\n" for record in sorted(records, key=lambda record: record["step"])]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def validation(end: float, steps=(50, 100)) -> list[dict]:
    return [
        {"step": s, "val_loss": end + 1 / s, "bits_per_byte": (end + 1 / s) / math.log(2), "seconds": 99.0}
        for s in steps
    ]


@pytest.fixture
def pair(tmp_path):
    fast = falling(2.0, 10) + validation(2.0)
    slow = falling(2.5, 20) + validation(2.5)
    return [
        write_run(tmp_path / "runs/fast/t1", fast),
        write_run(tmp_path / "runs/slow/t1", slow, lr=0.02, optimizer="adamw"),
    ]


def report(paths, metric="loss", window=1) -> dict[str, str]:
    """Sections of the report by title."""
    text = compare_runs.report(run_folder.read_runs(paths, metric), metric, window)
    _, *sections = text.split("\n## ")
    return dict(section.rstrip().split("\n\n", 1) for section in sections)


def cells(table: str) -> dict[str, list[str]]:
    """A Markdown table's rows by the first cell, without the rule below the header."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows if set(row[0]) != {"-"}}


def failure(capsys, *arguments) -> str:
    """The only line on stderr of a call that exits with 2."""
    assert compare_runs.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("compare_runs: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_recipe_section_has_only_differing_keys(pair):
    assert cells(report(pair)["Recipe"]) == {
        "key": ["fast", "slow"],
        "muon.lr": ["0.01", "0.02"],
        "optimizer.rule.0.optimizer": ['"muon"', '"adamw"'],
    }


def test_the_recipe_section_distinguishes_types_and_missing_keys(tmp_path):
    a, b = (write_run(tmp_path / name / "t", falling(2, 10)) for name in "ab")
    (a / "recipe.toml").write_text("x = 1\ny = true\n[t]\nonly = [1, 2]\nsame = 'v'")
    (b / "recipe.toml").write_text("x = 1.0\ny = 1\n[t]\nsame = 'v'")
    table = cells(report([a, b])["Recipe"])
    assert (table["x"], table["y"], table["t.only"]) == (["1", "1.0"], ["true", "1"], ["[1, 2]", "-"])
    assert "t.same" not in table


def test_the_report_states_equal_recipes(tmp_path):
    runs = [write_run(tmp_path / name / "t", falling(2, 10)) for name in "ab"]
    assert report(runs)["Recipe"] == "The recipes are the same."


def test_loss_table_has_evenly_spaced_common_steps_and_differences_to_the_first(pair):
    table = cells(report(pair)["Training loss"])
    steps = [int(step) for step in table if step.isdigit()]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) == 11
    first, second = 2 + 4 * math.exp(-10), 2.5 + 3.5 * math.exp(-5)
    assert table["100"] == [f"{first:.4f}", f"{second:.4f} ({second - first:+.4f})"]
    assert cells(report(pair)["Validation loss"])["50"] == ["2.0200", "2.5200 (+0.5000)"]
    assert cells(report(pair)["Bits per byte"])["100"] == ["2.8998", "3.6212 (+0.7213)"]


def test_the_loss_table_has_common_steps_and_the_last_step_of_every_run(tmp_path):
    a = write_run(tmp_path / "a/t", falling(2, 10, range(10, 101, 10)))
    b = write_run(tmp_path / "b/t", falling(2, 10, range(15, 61, 15)))
    table = cells(report([a, b])["Training loss"])
    assert [step for step in table if step.isdigit()] == ["30", "60"]
    assert table["end"][0].startswith("step 100: 2.000")
    assert table["end"][1].startswith("step 60: 2.00")


def test_the_report_names_runs_without_a_recorded_loss(tmp_path):
    a = write_run(tmp_path / "a/t", falling(2, 10) + validation(2))
    b = write_run(tmp_path / "b/t", falling(2, 10))
    assert report([a, b])["Validation loss"] == "Not recorded by b."


def test_losses_without_common_steps_show_the_last_values(tmp_path):
    a = write_run(tmp_path / "a/t", falling(2, 10) + validation(2, steps=[40]))
    b = write_run(tmp_path / "b/t", falling(2, 10) + validation(2, steps=[50]))
    assert cells(report([a, b])["Validation loss"])["end"] == ["step 40: 2.0250", "step 50: 2.0200 (-0.0050)"]


def test_steps_and_seconds_to_reach_a_loss(pair):
    steps, seconds = report(pair)["Training loss to reach"].split("\n\n")[1:]
    fast, slow = 2 + 4 * math.exp(-10), 2.5 + 3.5 * math.exp(-5)
    assert cells(steps)[f"{fast:.4f} (last of fast)"] == ["100", "-"]
    reached = math.ceil(-10 * math.log((slow - 2) / 4))
    assert cells(steps)[f"{slow:.4f} (last of slow)"] == [str(reached), f"100 ({100 / reached:.2f}x)"]
    assert cells(seconds)[f"{slow:.4f} (last of slow)"] == [f"{reached * 0.04:.1f}", f"4.0 ({100 / reached:.2f}x)"]
    thresholds = [float(name.split()[0]) for name in cells(steps) if name[0].isdigit()]
    assert len(thresholds) == 5
    assert thresholds == sorted(thresholds, reverse=True)


def test_the_report_omits_unrecorded_seconds(tmp_path):
    records = [{"step": s, "loss": 3 / s} for s in range(1, 20)]
    runs = [write_run(tmp_path / name / "t", records) for name in "ab"]
    sections = report(runs)
    assert "seconds to" not in sections["Training loss to reach"]
    assert sections["Speed"] == "Not recorded."


def test_a_run_with_a_final_nan_sets_no_threshold(tmp_path):
    a = write_run(tmp_path / "a/t", falling(2, 10))
    b = write_run(tmp_path / "b/t", [*falling(2, 10, range(1, 100)), {"step": 100, "loss": math.nan}])
    sections = report([a, b])
    assert "last of a" in sections["Training loss to reach"]
    assert "last of b" not in sections["Training loss to reach"]
    assert "nan" in sections["Training loss"]
    assert compare_runs.thresholds({"b": {1: 3.0, 2: math.inf}}) == {}


def test_speed_section_has_medians_and_ratios_to_the_first(pair):
    slow_start = {"step": 0, "tokens_per_second": 1.0, "time": {"optimizer": 9.0, "clip": 0.0}}
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(slow_start) + "\n")
    table = cells(report(pair)["Speed"])
    assert table["tokens/s"] == ["100", "50 (0.50x)"]
    assert table["step, ms"] == ["40.0", "40.0 (1.00x)"]
    assert table["forward-backward, ms"][0] == "20.0"
    assert table["clip, ms"][0] == "4.0"
    assert table["optimizer, ms"][0] == "10.0"
    assert table["peak memory, GiB"][0] == "1.50"
    assert table["MFU, %"][0] == "40.0"


def test_smoothing_is_the_mean_of_the_last_steps_and_shorter_at_the_start():
    series = {step: float(step) for step in (1, 5, 10, 18, 19, 20, 50, 58, 60)}
    smoothed = run_folder.smooth(series, window=10)
    assert smoothed == {1: 1, 5: 5, 10: 10, 18: 18, 19: 18.5, 20: 19, 50: 50, 58: 54, 60: 59}
    assert run_folder.smooth(series, window=1) == series
    assert [run_folder.smoothing_window([1, last]) for last in (3, 400, 10**6)] == [1, 20, 100]


def test_series_keep_the_last_record_of_a_step_in_order(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [{"step": s, "loss": s} for s in (30, 10, 20)] + [{"step": 20, "val_loss": 7, "loss": 5}]
    records += [{"step": 20, "loss": 6, "done": True, "note": "text", "lr": None}]
    file.write_text("\n".join(map(json.dumps, records)))
    series = run_folder.read_series(file)
    assert series == {"loss": {10: 10, 20: 6, 30: 30}, "val_loss": {20: 7}}
    assert list(series["loss"]) == [10, 20, 30]


def test_seconds_of_a_training_loss_exclude_the_next_validation(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 5, "loss": 2, "seconds": 1.5}\n{"step": 5, "val_loss": 3, "seconds": 9}\n')
    series = run_folder.read_series(file)
    assert (series["seconds.loss"], series["seconds.val_loss"]) == ({5: 1.5}, {5: 9})


def test_a_torn_last_line_is_skipped_and_named_once(pair, capsys, tmp_path):
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "lo')
    assert compare_runs.main([*map(str, pair), "--output", str(tmp_path / "c.png")]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "metrics.jsonl: skipped what is not a whole record: line 103" in error


def test_a_recipe_folder_selects_the_newest_run_with_metrics(tmp_path):
    for time in ("2025-01-01", "2025-01-03", "2025-01-02"):
        write_run(tmp_path / "muon" / time, falling(2, 10))
    write_run(tmp_path / "muon/2025-01-04", [])
    (tmp_path / "muon/2025-01-05").mkdir()
    assert run_folder.find_run(tmp_path / "muon") == tmp_path / "muon/2025-01-03"


def test_labels_are_recipe_names_or_unique_paths(tmp_path):
    folders = [tmp_path / "a/t1", tmp_path / "b/t1", tmp_path / "b/t2"]
    assert run_folder.unique_labels(folders[:2], [{}, {}]) == ["a", "b"]
    assert run_folder.unique_labels(folders, [{}, {}, {}]) == ["a/t1", "b/t1", "b/t2"]
    assert run_folder.unique_labels(folders[1:], [{}, {}]) == ["t1", "t2"], "what all have in common says nothing"


def three_runs(folder: Path) -> list[Path]:
    """Runs of a recipe with train.py's long names, and a few logged steps each."""
    runs = []
    for number, (lr, optimizer) in enumerate(((0.002, "muon"), (0.02, "adamw"), (0.02, "muon"))):
        name = f"2026010{number}-000000_muon.lr={lr},optimizer={optimizer},training.steps=30,warmup_steps=0,+6"
        runs.append(write_run(folder / name, falling(2, 10, range(1, 31, 10)), lr=lr, optimizer=optimizer))
    return runs


def test_runs_of_a_recipe_are_labelled_by_differing_keys(tmp_path):
    labels = [run.label for run in run_folder.read_runs(three_runs(tmp_path), "loss")]
    assert labels == ["muon.lr=0.002 optimizer=muon", "muon.lr=0.02 optimizer=adamw", "muon.lr=0.02 optimizer=muon"]


def test_every_label_is_inside_the_picture_and_hides_no_curve(tmp_path):
    """A legend inside the axes would be wider than the axes."""
    runs = three_runs(tmp_path / "a") + [write_run(tmp_path / "b" / f"{'long' * 30}-{i}", falling(2, 10)) for i in "ab"]
    figure = run_picture.picture(run_folder.read_runs(runs, "loss"), "loss", 1, None, "step")
    figure.draw_without_rendering()
    inside, (legend,) = figure.bbox.padded(1), figure.legends
    area = legend.get_window_extent()
    assert inside.contains(*area.min)
    assert inside.contains(*area.max)
    for axes in figure.axes:
        assert not axes.get_tightbbox().overlaps(area)
        for text in axes.texts:
            assert axes.bbox.padded(2).contains(*text.get_window_extent().max), text.get_text()


def test_a_glob_over_the_runs_of_a_recipe_is_accepted(tmp_path, capsys):
    """The glob also matches the file `latest`, and runs without a finished step."""
    runs = three_runs(tmp_path)
    (tmp_path / "latest").write_text(runs[-1].name)
    (tmp_path / "20260105-000000").mkdir()
    for name in ("compare.png", "compare.html", "failed.log"):
        (tmp_path / name).write_text("from an earlier comparison")
    assert compare_runs.main([*map(str, sorted(tmp_path.iterdir())), "--output", str(tmp_path / "c.png")]) == 0
    assert "20260105-000000: passed over" in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml")])
@pytest.mark.parametrize("metric", ["loss", "bits_per_byte"])
def test_the_suffix_selects_the_format_of_the_picture(pair, tmp_path, capsys, suffix, magic, metric):
    output = tmp_path / f"curves{suffix}"
    arguments = [*map(str, pair), "--output", str(output), "--metric", metric, "--title", "Two runs"]
    assert compare_runs.main(arguments) == 0
    assert output.read_bytes().startswith(magic)
    assert output.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.startswith(f"- fast: {pair[0]}, to step 100\n")
    assert printed.endswith(f"Picture: {output}\n")


def test_the_parts_of_the_step_add_up_to_the_step(pair):
    run = run_folder.read_runs(pair, "loss")[0]
    parts = {fill.title: round(width, 6) for fill, width in run_picture.parts_of_step(run).items()}
    assert parts == {"forward-backward": 20, "clip": 4, "optimizer": 10, "rest": 6}


def test_a_folder_name_is_no_formula(tmp_path):
    runs = [write_run(tmp_path / name / "t", falling(2.0, 10)) for name in ("a", "$\\frac{a$")]
    arguments = [*map(str, runs), "--output", str(tmp_path / "c.png"), "--html", str(tmp_path / "c.html")]
    assert compare_runs.main(arguments) == 0


def test_the_picture_needs_no_times(tmp_path):
    records = [{"step": s, "loss": 3 / s} for s in range(1, 20)]
    runs = [write_run(tmp_path / name / "t", records) for name in "ab"]
    assert compare_runs.main([*map(str, runs), "--output", str(tmp_path / "c.svg")]) == 0
    assert (tmp_path / "c.svg").stat().st_size > 10_000


@pytest.mark.parametrize(("axis", "last"), [("step", 4), ("step", 20), ("tokens", 17), ("seconds", 3)])
def test_ticks_are_where_their_labels_say(tmp_path, axis, last):
    runs = []
    for name in ("a", "b"):
        records = falling(2.0, 10, range(1, last + 1))
        for record in records:
            record |= {"tokens": record["step"], "seconds": float(record["step"])}
        runs.append(write_run(tmp_path / name / "t", records, lr=len(runs)))
    figure = run_picture.picture(run_folder.read_runs(runs, "loss", axis), "loss", 1, None, axis)
    figure.draw_without_rendering()
    ticks = figure.axes[0].get_xaxis()
    labels = [label.get_text() for label in ticks.get_ticklabels()]
    assert len(labels) > 2
    assert [float(label.replace("\N{MINUS SIGN}", "-")) for label in labels] == pytest.approx(ticks.get_ticklocs())


def test_fewer_than_two_runs_are_refused(pair, capsys):
    assert "a comparison takes two or more runs, not 0" in failure(capsys)
    assert "a comparison takes two or more runs, not 1" in failure(capsys, pair[0])


def test_the_same_run_twice_is_refused(pair, capsys):
    assert f"{pair[0].parent}: the same run is given twice" in failure(capsys, pair[0].parent, pair[0]).replace(
        "/t1", ""
    )


def test_a_folder_without_a_run_is_refused(pair, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty: neither a run" in failure(capsys, pair[0], tmp_path / "empty")
    assert f"absent: no such folder; {tmp_path} has empty, runs" in failure(capsys, pair[0], tmp_path / "absent")
    shown = failure(capsys, pair[0], tmp_path / "runs" / "llama_adamw")
    command = shown.split("train the recipe first: python ")[1].split()
    assert command[:2] == [os.path.relpath(SCRIPTS.parent / "train.py"), "--config"]
    assert Path(command[2]).name == "llama_adamw.toml"
    assert Path(command[2]).is_file()


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl"])
def test_a_missing_file_is_named(pair, capsys, name):
    (pair[1] / name).unlink()
    assert f"{pair[1] / name}: no such file" in failure(capsys, *pair)


@pytest.mark.parametrize("text", ["", '\n\n{"step', "[1]\n", '{"loss": 1}\n'])
def test_a_run_without_a_record_is_refused(pair, text):
    (pair[1] / "metrics.jsonl").write_text(text)
    with pytest.raises(run_folder.RunError, match="no record; the run has not logged a step"):
        run_folder.read_runs(pair, "loss")


def test_a_broken_recipe_is_named(pair, capsys):
    (pair[1] / "recipe.toml").write_text("[muon\n")
    assert f"{pair[1] / 'recipe.toml'}: not TOML" in failure(capsys, *pair)


def test_runs_with_no_common_step_are_refused(tmp_path, capsys):
    a = write_run(tmp_path / "a/t", falling(2, 10, [1, 3]))
    b = write_run(tmp_path / "b/t", falling(2, 10, [2, 4]))
    assert "a, b: no step at which each of them recorded `loss`" in failure(capsys, a, b)


def test_an_unrecorded_metric_is_refused(tmp_path, capsys):
    runs = [write_run(tmp_path / name / "t", falling(2, 10)) for name in "ab"]
    assert "metrics.jsonl: `val_loss` was not recorded" in failure(capsys, *runs, "--metric", "val_loss")


@pytest.mark.parametrize(
    ("output", "message"),
    [("c.pdf", "the suffix must be .png or .svg"), ("c", "the suffix must be"), ("no/c.png", "there is no folder")],
)
def test_an_unwritable_output_is_refused(pair, capsys, tmp_path, output, message):
    assert message in failure(capsys, *pair, "--output", tmp_path / output)


def test_the_script_runs_by_path_without_torch(pair, tmp_path):
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    script = str(SCRIPTS / "compare_runs.py")
    environment = {"PYTHONPATH": str(SCRIPTS), "PATH": ""}
    subprocess.run([sys.executable, "-c", code, script], check=True, cwd=tmp_path, env=environment)
    subprocess.run([sys.executable, script, *map(str, pair)], check=True, cwd=SCRIPTS, capture_output=True)
    assert (tmp_path / "runs/compare.png").is_file()
    assert not (SCRIPTS / "compare.png").exists()


def batch(folder: Path, tokens: int, *, step: int = 10) -> Path:
    """A run of `tokens` tokens a step; the loss depends only on the trained tokens."""
    steps = [1, *range(step, 101, step)]
    records = [{"step": s, "tokens": s * tokens, "loss": 6 - s * tokens / 1e5} for s in steps]
    held_out = [{"step": s, "tokens": s * tokens, "val_loss": 7 - s * tokens / 1e5} for s in (50, 100)]
    return write_run(folder, records + held_out)


def test_runs_of_different_batch_sizes_are_compared_by_tokens(tmp_path, capsys):
    """At equal steps the curves differ, because a run has seen twice the tokens."""
    runs = [batch(tmp_path / "a/t", 2048), batch(tmp_path / "b/t", 1024)]
    recipe = report(runs)["Recipe"]
    assert cells(recipe)["tokens a step"] == ["2,048", "1,024"]
    assert "Warning: the runs do not train on the same tokens in a step" in recipe
    arguments = ["--x", "tokens", "--output", str(tmp_path / "x.png")]
    assert compare_runs.main([*map(str, runs), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "Warning: the runs do not train" in shown, "it is said whatever the axis"
    table = cells(shown.split("## Training loss")[1].split("## ")[0])
    assert table["102,400"] == ["4.9760", "4.9760 (+0.0000)"]
    assert "(-" not in "".join(table["102,400"] + table["20,480"])
    validation = cells(shown.split("## Validation loss")[1].split("## ")[0])
    assert validation["102,400"] == ["5.9760", "5.9760 (+0.0000)"], "validations carry tokens too"


def seeded(folder: Path, seed: int, end: float, *, lr: float = 0.01, second: float = 0.04) -> Path:
    """A run with a seed and the last loss `end`; a step takes `second` seconds."""
    records = [{"step": s, "loss": 6 - (6 - end) * s / 100, "seconds": s * second} for s in range(10, 101, 10)]
    run = write_run(folder, records, lr=lr)
    with (run / "recipe.toml").open("a") as file:
        file.write(f"[debug]\nseed = {seed}\n[data]\nseed = {seed}\n")
    return run


def test_runs_with_different_seeds_are_a_mean_curve_with_a_band(tmp_path):
    paths = [seeded(tmp_path / f"x/{seed}", seed, 2 + seed) for seed in (0, 1, 2)]
    paths.append(seeded(tmp_path / "x/high", 0, 5.0, lr=0.1))
    mean, single = run_folder.read_runs(paths, "loss")
    assert (mean.label, mean.seeds, single.label) == ("muon.lr=0.01 (3 seeds)", 3, "muon.lr=0.1")
    assert (mean.of("loss")[100], mean.spread["loss"][100]) == (3.0, 1.0)
    axes = run_picture.picture([mean, single], "loss", 1, None, "step").axes[0]
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).ymin == 2.0
    assert cells(report(paths)["Training loss"])["± over seeds"] == ["1.0000", "-"]
    repeated = [*paths[:2], seeded(tmp_path / "x/again", 0, 3.0)]
    assert [run.seeds for run in run_folder.read_runs(repeated, "loss")] == [2, 1], "equal seeds are repetitions"


def test_losses_are_compared_after_the_same_time(tmp_path, capsys):
    fast = seeded(tmp_path / "fast/t", 0, 2.0, second=0.5)
    slow = seeded(tmp_path / "slow/t", 0, 2.0, second=1.0)
    assert compare_runs.main([str(fast), str(slow), "--x", "seconds"]) == 0
    sections = capsys.readouterr().out.split("## ")
    table = cells(next(text for text in sections if text.startswith("Training loss\n")).partition("\n\n")[2])
    assert table["50.0"] == ["2.0000", "4.0000 (+2.0000)"], "the fast run has done 100 steps, the slow one 50"
    assert (tmp_path / "compare.png").is_file()


def test_a_page_is_a_single_file_with_curves_and_tables(pair, tmp_path):
    page = tmp_path / "page.html"
    assert compare_runs.main([*map(str, pair), "--html", str(page), "--title", "a < b"]) == 0
    text = page.read_text()
    assert "<h1>a &lt; b</h1>" in text
    assert "<svg" in text
    assert "<th>fast<th>slow" in text
    assert "src=" not in text
    assert "#010203" not in text
    assert "svg { width: 100%; height: auto; fill: currentColor }" in text, "else black on black in a dark page"


def test_runs_of_the_same_batch_get_no_warning(tmp_path):
    recipe = report([batch(tmp_path / "a/t", 2048), batch(tmp_path / "b/t", 2048, step=20)])["Recipe"]
    assert cells(recipe)["tokens a step"] == ["2,048", "2,048"]
    assert "Warning" not in recipe


def test_comparing_by_tokens_needs_recorded_tokens(pair, tmp_path, capsys):
    assert "`tokens` was not recorded; compare with --x step" in failure(capsys, *pair, "--x", "tokens")


def test_find_run_selects_the_newest_run_by_time(tmp_path):
    for name in ("20260101-000000_z=z", "20260101-000000-2", "20250101-000000"):
        batch(tmp_path / name, 1)
    assert run_folder.find_run(tmp_path).name == "20260101-000000-2"
