"""The picture of `--plot`: what is written in it stands apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.support import record, settings
from tests.loadtest.test_statistics import measured


def test_the_heading_stands_clear_of_the_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from gateway.loadtest import plots

    drawn: list[Any] = []

    def figure(**how: Any) -> Any:
        drawn.append(figures.Figure(**how))
        return drawn[-1]

    monkeypatch.setattr(plots, "Figure", figure)
    words = ("--request-rate", "5", "--goodput", "ttft:500")
    run = measured([record(0, events=[0.1, 0.2]), record(1, events=[0.3, 0.5])], *words)
    plots.picture(tmp_path / "p.png", [run], settings(*words))
    renderer = drawn[0].canvas.get_renderer()
    heading = drawn[0]._suptitle.get_window_extent(renderer)
    assert heading.y0 > max(axes.title.get_window_extent(renderer).y1 for axes in drawn[0].axes)
