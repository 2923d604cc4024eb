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
        ("accepted:3:0.5", 1.875),
    ],
)
def test_a_distribution_has_its_mean_and_its_seed(spec: str, mean: float) -> None:
    draw = parse(spec, tokens=True).draw
    drawn = [draw(rng) for rng in [Random(7)] for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.1)
    assert [draw(rng) for rng in [Random(7)] for _ in range(4000)] == drawn


def test_nothing_negative_comes_out() -> None:
    draw, rng = parse("normal:0.001:0.1").draw, Random(0)
    drawn = [draw(rng) for _ in range(200)]
    assert min(drawn) == 0
    assert max(drawn) > 0


def test_a_list_comes_in_turn_and_a_prompt_by_its_tokens() -> None:
    listed, by_token = parse("list:1:2:3"), parse("per_token:0.5:0.01")
    assert [listed.draw(Random(0), nth) for nth in range(5)] == [1, 2, 3, 1, 2]
    assert parse([1, 2.5]) == parse("list:1:2.5")
    assert by_token.draw(Random(0), 7, 50) == 1.0


def test_tokens_are_whole_and_at_least_one() -> None:
    assert {parse("normal:0:2", tokens=True).count(Random(seed)) for seed in range(50)} >= {1, 2, 3}
    with pytest.raises(ValueError, match="0 is out of range: 1 or more is expected"):
        parse(0, tokens=True)
    with pytest.raises(ValueError, match="accepted:DRAFTS:CHANCE is expected, DRAFTS 1 or more"):
        parse("accepted:2.5:0.5", tokens=True)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("soon", "'soon' is not a number"),
        ("poisson:3", "unknown distribution 'poisson'"),
        ("normale:1:2", "unknown distribution 'normale'; the nearest is normal"),
        ("list", "'list' is not a number|list:VALUE... is expected, and 0 value"),
        ("per_token:1", "per_token:BASE:EACH is expected, and 1 value"),
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
