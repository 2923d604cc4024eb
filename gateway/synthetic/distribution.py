"""Durations as the operator writes them: a number of seconds, or a distribution to draw them from.

A draw takes its randomness as an argument, so that whoever owns the seed owns the sequence. What can come out is
never negative: a normal distribution is cut at zero, as a token cannot come before the one it follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Draw = Callable[[Random], float]

_EXPECTED = (
    "expected seconds (0.05) or a distribution: constant:SECONDS, normal:MEAN:STDDEV, uniform:LOW:HIGH,"
    " exponential:MEAN, lognormal:MEDIAN:SIGMA"
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A parsed distribution. `spec` is what was written, for messages and equality; `draw` makes one duration."""

    spec: str
    draw: Draw = field(repr=False, compare=False)


def parse(spec: str | float) -> Distribution:
    """Read a duration. Raises ValueError with what was found and what is expected."""
    if isinstance(spec, bool) or not isinstance(spec, str | int | float):
        raise ValueError(f"{spec!r} is not a duration: {_EXPECTED}")
    if not isinstance(spec, str):
        return Distribution(str(spec), _constant(_seconds(str(spec), spec)))
    kind, *words = spec.strip().split(":")
    if kind not in _KINDS:
        if words:
            raise ValueError(f"{spec!r}: unknown distribution {kind!r}: {_EXPECTED}")
        kind, words = "constant", [kind]
    names, make = _KINDS[kind]
    if len(words) != len(names):
        expected = ":".join((kind, *names))
        raise ValueError(f"{spec!r}: {expected} is expected, and {len(words)} value(s) were found")
    return Distribution(spec.strip(), make(spec, [_seconds(spec, word) for word in words]))


def _seconds(spec: str, word: str | float) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{spec!r}: {word!r} is not a number: {_EXPECTED}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{spec!r}: {word} is out of range: a finite number, zero or more, is expected")
    return value


def _constant(value: float) -> Draw:
    return lambda rng: value


def _normal(mean: float, deviation: float) -> Draw:
    return lambda rng: max(0.0, rng.gauss(mean, deviation))


def _uniform(spec: str, low: float, high: float) -> Draw:
    if low > high:
        raise ValueError(f"{spec!r}: LOW {low:g} is above HIGH {high:g}: uniform:LOW:HIGH is expected")
    return lambda rng: rng.uniform(low, high)


def _exponential(mean: float) -> Draw:
    return _constant(0.0) if mean == 0 else lambda rng: rng.expovariate(1.0 / mean)


def _lognormal(median: float, sigma: float) -> Draw:
    # The median, and not the mean of the logarithm, since that is the figure one reads off a measurement.
    return lambda rng: median * math.exp(rng.gauss(0.0, sigma))


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str, list[float]], Draw]]] = {
    "constant": (("SECONDS",), lambda spec, v: _constant(v[0])),
    "normal": (("MEAN", "STDDEV"), lambda spec, v: _normal(v[0], v[1])),
    "uniform": (("LOW", "HIGH"), lambda spec, v: _uniform(spec, v[0], v[1])),
    "exponential": (("MEAN",), lambda spec, v: _exponential(v[0])),
    "lognormal": (("MEDIAN", "SIGMA"), lambda spec, v: _lognormal(v[0], v[1])),
}
