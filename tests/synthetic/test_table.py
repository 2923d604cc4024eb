"""Every row of deploy/mock.md, seen on the wire. A row without a check fails, and so does a check without a row."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.synthetic.behaviour import KNOBS, SERVER_KNOBS
from gateway.synthetic.faults import CATALOGUE
from tests.synthetic import checks_asking, checks_connectors, checks_engine, checks_faults, checks_shape
from tests.synthetic.trial import CHECKS, PAGE, Trial, rows

assert checks_asking and checks_connectors and checks_engine and checks_faults and checks_shape  # they register themselves


@pytest.fixture
async def trial(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Trial]:
    trial = Trial(request.node.callspec.params["row"], tmp_path)
    yield trial
    await trial.stop()


@pytest.mark.parametrize("row", rows())
async def test_row(trial: Trial, row: str) -> None:
    assert row in CHECKS, f"{PAGE.name} has a row that no test sees: {row}"
    await CHECKS[row](trial)


def test_the_table_is_whole() -> None:
    found = rows()
    assert len(found) == len(set(found))
    assert not (gone := set(CHECKS) - set(found)), f"{PAGE.name} has no row for {gone}"
    asked = "\n".join(found)
    knobs = {name for name in (*KNOBS, *SERVER_KNOBS) if not re.search(rf"(^|;){name}=", asked, re.M)}
    faults = {name for name in CATALOGUE if not re.search(rf"fault=(.*,)?{name}\b", asked)}
    assert not knobs | faults, f"{PAGE.name} says nothing of {knobs | faults}"
