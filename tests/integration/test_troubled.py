"""A fleet with slow, flapping and hanging members, in small: `python -m tests.bench.troubled` is all of it, with times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.troubled import KINDS, load, summary


@pytest.mark.seconds(90)
async def test_nobody_sees_what_another_backend_can_prevent(tmp_path: Path) -> None:
    found = summary(*await load(tuple(KINDS), 240, 40.0, tmp_path))
    assert not found["failed"]
    assert found["statuses"].get(200, 0) + found["killed"] == 240, found
    assert found["killed"] <= 12
    assert (found["counted"], found["in_flight"]) == (240, 0)
    assert "hanging" not in found["shares"]
    assert found["apart"] <= 0.25
    assert found["shares"]["slow"] < found["shares"]["well-0"]
