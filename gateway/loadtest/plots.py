"""The plots of a load test, drawn by matplotlib (the extra tokenpipe[report]); imported only where one is asked for.

Each panel draws into the axes that it is given, so that the same ones make the report's figures and the one picture of
--plot. Lines are thinned to what can be seen, and scatters drawn from a sample: a million points are no better to look at.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gateway.errors import ConfigError
from gateway.loadtest.records import Record
from gateway.loadtest.results import Measured
from gateway.loadtest.settings import Settings
from gateway.loadtest.statistics import percentile

POINTS = 400  # of one line at most
SCATTERED = 1500  # points of one scatter at most
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")  # Okabe and Ito's
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud, and is a tenth of the size
    "svg.hashsalt": "tokenpipe",
}
MEASURES: dict[str, Callable[[Record], Iterable[float]]] = {
    "TTFT": lambda record: _one(record.ttft),
    "TPOT": lambda record: _one(record.tpot_vllm),
    "ITL": lambda record: record.gaps,
    "E2EL": lambda record: _one(record.latency),
}


def _one(value: float | None) -> Iterable[float]:
    return () if value is None else (value,)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a legend: an endpoint at a rate."""

    label: str
    colour: str
    records: list[Record]  # of requests that succeeded
    all_records: list[Record]
    duration: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """`describe`: what it shows, in words, for whoever cannot see it."""

    title: str
    describe: str
    draw: Callable[[Axes], None]


def rate_text(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g} req/s"


def series_of(measured: Sequence[Measured], settings: Settings) -> list[Series]:
    colours = itertools.cycle(COLOURS)
    found = []
    for each in measured:
        for which, records in enumerate(each.run.records):
            words = [rate_text(each.run.rate)] if len(measured) > 1 else []
            if len(settings.urls) > 1:
                words.append("first" if which == 0 else "second")
            good = [record for record in records if each.succeeded(record)]
            found.append(Series(", ".join(words), next(colours), good, records, each.run.duration))
    return found


def panels(measured: Sequence[Measured], settings: Settings) -> list[Panel]:
    """All that there is to draw of these runs."""
    series = series_of(measured, settings)
    found = [
        Panel(
            f"{name}: share of {'gaps' if name == 'ITL' else 'requests'} that are as fast",
            f"Cumulative distribution of {name} in milliseconds.",
            _cdf(series, measure),
        )
        for name, measure in MEASURES.items()
    ]
    found += [
        Panel(f"{name} over time", f"{name} of requests, by when they were sent.", _over_time(series, measure))
        for name, measure in MEASURES.items()
        if name != "ITL"
    ]
    found.append(
        Panel("ITL over time", "Median and 99th percentile of the gaps in each slice of time.", _gaps_over_time(series))
    )
    found.append(Panel("Output over time", "Output events a second, in slices of time.", _throughput(series)))
    found.append(Panel("Requests under way", "How many requests were under way at each moment.", _concurrency(series)))
    if len({each.run.rate for each in measured}) > 1:
        found.append(
            Panel("Goodput frontier", "Requests and good requests a second, by the rate asked for.", _frontier(measured))
        )
        found.append(
            Panel("Latency by rate", "Median and 99th percentile of TTFT and TPOT, by the rate asked for.", _by_rate(measured))
        )
    if any(each.differences for each in measured):
        found.append(Panel("What the first endpoint adds", "Distribution of the differences, pair by pair.", _added(measured)))
    return found


# -- panels ------------------------------------------------------------------------------------------------------------


def _label(axes: Axes, x: str, y: str, series: Sequence[Series] = ()) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if any(each.label for each in series) and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _thin(values: Sequence[float]) -> Sequence[int]:
    """Places of values in order, evenly spread, the last among them."""
    count = len(values)
    if count <= POINTS:
        return range(count)
    return [round(place * (count - 1) / (POINTS - 1)) for place in range(POINTS)]


def _cdf(series: Sequence[Series], measure: Callable[[Record], Iterable[float]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        least, most = math.inf, 0.0
        for each in series:
            ordered = sorted(value * 1e3 for record in each.records for value in measure(record))
            if ordered:
                places = _thin(ordered)
                shares = [(place + 1) / len(ordered) for place in places]
                axes.plot(
                    [ordered[place] for place in places], shares, drawstyle="steps-post", color=each.colour, label=each.label
                )
                least, most = min(least, percentile(ordered, 1)), max(most, ordered[-1])
        if least > 0 and most > 20 * least:
            axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        _label(axes, "ms", "share", series)

    return draw


def _over_time(series: Sequence[Series], measure: Callable[[Record], Iterable[float]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for each in series:
            points = [(record.started, value * 1e3) for record in each.records for value in measure(record)]
            if len(points) > SCATTERED:
                points = Random(0).sample(points, SCATTERED)
            axes.plot(*_columns(points), ".", markersize=3, alpha=0.6, color=each.colour, label=each.label)
            failed = [(r.ended, 0.0) for r in each.all_records if r.finished and not _is_in(r, each.records)]
            axes.plot(*_columns(failed[:SCATTERED]), "x", markersize=5, color="#cc0000")
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        _label(axes, "seconds since the run's start (x: failed)", "ms", series)

    return draw


def _is_in(record: Record, records: Sequence[Record]) -> bool:
    """Both are in the order of their index."""
    place = bisect.bisect_left(records, record.index, key=lambda each: each.index)
    return place < len(records) and records[place] is record


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _slices(duration: float) -> float:
    """Seconds of one slice of time: a round number, a hundred of them at most."""
    for seconds in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600):
        if duration <= 100 * seconds:
            return seconds
    return 3600


def _gaps_over_time(series: Sequence[Series]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for each in series:
            width = _slices(each.duration)
            slices: dict[int, list[float]] = {}
            for record in each.records:
                for at, gap in zip(record.events[1:], record.gaps, strict=True):
                    slices.setdefault(int(at / width), []).append(gap * 1e3)
            times = [place * width for place in sorted(slices)]
            for percent, style in ((50, "-"), (99, ":")):
                values = [percentile(sorted(slices[place]), percent) for place in sorted(slices)]
                axes.plot(times, values, style, color=each.colour, label=f"{each.label} p{percent}".strip())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds since the run's start")
        axes.set_ylabel("ms")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)

    return draw


def _throughput(series: Sequence[Series]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for each in series:
            width = _slices(each.duration)
            counts = [0] * (int(each.duration / width) + 2)
            for record in each.all_records:
                for at in record.events:
                    counts[min(int(at / width), len(counts) - 1)] += 1
            times = [place * width for place in range(len(counts))]
            rates = [count / width for count in counts]
            axes.plot(times, rates, drawstyle="steps-post", color=each.colour, label=each.label)
        axes.set_ylim(bottom=0)
        _label(axes, "seconds since the run's start", "output events a second", series)

    return draw


def _concurrency(series: Sequence[Series]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for each in series:
            steps = [(record.started, 1) for record in each.all_records] + [(record.ended, -1) for record in each.all_records]
            steps.sort()
            totals = list(itertools.accumulate(step for _, step in steps))
            places = _thin(totals)
            times = [steps[place][0] for place in places]
            axes.plot(times, [totals[place] for place in places], drawstyle="steps-post", color=each.colour, label=each.label)
        axes.set_ylim(bottom=0)
        _label(axes, "seconds since the run's start", "requests", series)

    return draw


def _by_rates(measured: Sequence[Measured]) -> tuple[list[Measured], list[float]]:
    """In order of rate; one that is infinite stands where its requests came through."""
    ordered = sorted(measured, key=lambda each: each.run.rate)
    return ordered, [each.metrics[0].request_throughput if math.isinf(each.run.rate) else each.run.rate for each in ordered]


def _frontier(measured: Sequence[Measured]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        ordered, rates = _by_rates(measured)
        axes.plot(rates, rates, "--", color="#999999", linewidth=1, label="asked for")
        axes.plot(rates, [each.metrics[0].request_throughput for each in ordered], "o-", color=COLOURS[0], label="succeeded")
        goodputs = [(rate, each.metrics[0].request_goodput) for rate, each in zip(rates, ordered, strict=True)]
        good = [(rate, value) for rate, value in goodputs if value is not None]
        if good:
            axes.plot(*_columns(good), "s-", color=COLOURS[2], label="within the goodput limits")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        _label(axes, "requests a second asked for", "requests a second")

    return draw


def _by_rate(measured: Sequence[Measured]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        ordered, rates = _by_rates(measured)
        for name, colour in (("ttft", COLOURS[0]), ("tpot", COLOURS[1])):
            spreads = [getattr(each.metrics[0], name) for each in ordered]
            for percent, style in ((50, "o-"), (99, "s:")):
                values = [percentile(each.ordered, percent) * 1e3 for each in spreads]
                axes.plot(rates, values, style, color=colour, label=f"{name.upper()} p{percent}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend(fontsize=8)
        _label(axes, "requests a second asked for", "ms")

    return draw


def _added(measured: Sequence[Measured]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for difference, colour in zip(measured[-1].differences, itertools.cycle(COLOURS), strict=False):
            places = _thin(difference.ordered)
            values = [difference.ordered[place] * 1e3 for place in places]
            shares = [(place + 1) / difference.pairs for place in places]
            axes.plot(values, shares, drawstyle="steps-post", color=colour, label=difference.name.upper())
        axes.axvline(0, color="#999999", linewidth=1)
        axes.legend(fontsize=8)
        _label(axes, "ms more than the second endpoint", "share of pairs")

    return draw


# -- what is made of them ----------------------------------------------------------------------------------------------


def svg(panel: Panel, name: str) -> str:
    """One panel as an SVG element that can stand in a page beside others: `name` keeps their identifiers apart."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 3.4), layout="tight")
        panel.draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{panel.describe}" ', 1)


def picture(path: Path, measured: Sequence[Measured], settings: Settings) -> None:
    """All panels in one file. Raises ConfigError where it cannot be written."""
    found = panels(measured, settings)
    columns = 3
    rows = math.ceil(len(found) / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(heading(settings, measured), fontsize=12)
        for place, panel in enumerate(found):
            axes = figure.add_subplot(rows, columns, place + 1)
            panel.draw(axes)
            axes.set_title(panel.title)
        metadata: dict[str, Any] = {"Software": None} if path.suffix.lower() == ".png" else {}
        try:
            figure.savefig(path, dpi=110, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"--plot: {path} cannot be written: {error.strerror or error}") from None


def heading(settings: Settings, measured: Sequence[Measured]) -> str:
    rates = ", ".join(rate_text(each.run.rate) for each in measured)
    return f"{settings.url}, {settings.num_prompts} requests ({rates}), {measured[0].run.began:%Y-%m-%d %H:%M}"
