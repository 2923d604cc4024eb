"""What time a hand-off has."""

from __future__ import annotations

import pytest

from gateway.core.disagg.budget import dead


@pytest.mark.parametrize(
    ("hold", "now", "wanted"),
    [(30.0, 100.0, False), (30.0, 124.0, False), (30.0, 124.1, True), (30.0, 99.0, False), (480.0, 484.1, True),
     (0.0, 1e9, False)],
)
def test_dead(hold: float, now: float, wanted: bool) -> None:
    assert dead(hold, 100.0, now) is wanted
