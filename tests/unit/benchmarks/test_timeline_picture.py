"""The picture of the modelled step by several strategies."""

from pathlib import Path

from benchmarks.timeline_picture import main


def test_our_plan_is_the_fastest_of_the_strategies_in_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    ours, *others = main("qwen3_0.6b", 8, picture).values()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(others) == 4
    assert ours <= min(others)
