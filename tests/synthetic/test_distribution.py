"""Durations as an operator writes them."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from gateway.synthetic.distribution import parse
from gateway.synthetic.settings import MockSettings


@pytest.mark.parametrize("spec", [0.05, 0, 1, "0.05", " 0.05 ", "constant:0.05"])
def test_a_number_is_a_constant(spec: str | float) -> None:
    draw, rng = parse(spec).draw, Random(0)
    assert {draw(rng) for _ in range(5)} == {float(str(spec).rpartition(":")[2])}


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        ("normal:0.05:0.01", 0.05),
        ("uniform:0.01:0.03", 0.02),
        ("exponential:0.02", 0.02),
        ("exponential:0", 0.0),
        ("lognormal:0.02:0.1", 0.0201),
    ],
)
def test_a_distribution_has_its_mean_and_its_seed(spec: str, mean: float) -> None:
    draw = parse(spec).draw
    drawn = [draw(rng) for rng in [Random(7)] for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.1)
    assert [draw(rng) for rng in [Random(7)] for _ in range(4000)] == drawn


def test_nothing_negative_comes_out() -> None:
    draw, rng = parse("normal:0.001:0.1").draw, Random(0)
    drawn = [draw(rng) for _ in range(200)]
    assert min(drawn) == 0
    assert max(drawn) > 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("soon", "'soon' is not a number"),
        ("poisson:3", "unknown distribution 'poisson'"),
        ("normal:0.05", "normal:MEAN:STDDEV is expected, and 1 value"),
        ("uniform:0.01:x", "'x' is not a number"),
        ("uniform:0.3:0.1", "LOW 0.3 is above HIGH 0.1"),
        ("-1", "-1 is out of range"),
        (-1, "-1 is out of range"),
        ("nan", "nan is out of range"),
        (float("inf"), "inf is out of range"),
        ("", "is not a number"),
        (True, "True is not a duration"),
        (None, "None is not a duration"),
    ],
)
def test_what_is_wrong_is_said(spec: str | float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(spec)


@pytest.mark.parametrize(
    "wrong", [{"ttft": "x"}, {"itl": "normal:1"}, {"tokens": 0}, {"port": 70000}, {"model": ""}, {"max_model_len": 1}]
)
def test_settings_name_the_field(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: "):
        MockSettings(**wrong)  # type: ignore[arg-type]
