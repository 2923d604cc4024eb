"""The report: one HTML file that needs nothing else, neither a network nor a script. Figures as tables, plots as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from gateway import __version__
from gateway.errors import ConfigError
from gateway.loadtest import plots
from gateway.loadtest.compare import Estimate
from gateway.loadtest.results import METRICS, Measured, shown_metrics, table, word
from gateway.loadtest.settings import Settings
from gateway.loadtest.statistics import Metrics, errors

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc; --warn: #fff3cd; --warn-ink: #5c4400; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --line: #444; --warn: #4a3b00; --warn-ink: #ffe69c; }
}
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; background: #fff; color: #1a1a1a; border: 1px solid var(--line); border-radius: 6px; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; padding: .2rem .4rem; }
.warning { background: var(--warn); color: var(--warn-ink); padding: .7rem 1rem; border-radius: 6px; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; font-size: 13px; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is fetched, nothing runs


def write(path: Path, settings: Settings, model: str, measured: Sequence[Measured]) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        path.write_text(page(settings, model, measured), "utf-8")
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror or error}") from None


def page(settings: Settings, model: str, measured: Sequence[Measured]) -> str:
    title = f"Load test of {settings.url}"
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>",
        *_warnings(measured),
        _facts(settings, model, measured),
        "<h2>Summary</h2>",
        _summary(settings, measured),
    ]
    for each in measured:
        for which, metrics in enumerate(each.metrics):
            parts.append(_latencies(settings, each, which, metrics))
        if each.differences:
            parts.append(_added(each))
    parts += ["<h2>Plots</h2>", '<div class="plots">', *_figures(settings, measured), "</div>"]
    parts += [_failures(measured), "<h2>As printed</h2>"]
    parts += [f"<pre>{_text(table(settings, each))}</pre>" for each in measured]
    parts.append(f"<footer><p>tokenpipe {_text(__version__)}</p></footer>\n</body>\n</html>\n")
    return "\n".join(part for part in parts if part)


def _text(text: object) -> str:
    return html.escape(str(text))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f'<div class="scroll"><table><caption>{_text(caption)}</caption>']
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head) + "</tr></thead><tbody>")
    for row in rows:
        first, *others = row
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _warnings(measured: Sequence[Measured]) -> list[str]:
    lines = []
    if any(each.run.interrupted for each in measured):
        lines.append('<p class="warning" role="note">The test was interrupted: this is what was finished by then.</p>')
    for each in measured:
        if each.check.doubts:
            said = "; ".join(each.check.doubts)
            lines.append(
                f'<p class="warning" role="note">At {_text(plots.rate_text(each.run.rate))} the load tester\'s own machine, '
                f"not only the endpoint, was the limit: {_text(said)}. "
                "Latencies are upper bounds, throughputs lower bounds.</p>"
            )
    return lines


def _facts(settings: Settings, model: str, measured: Sequence[Measured]) -> str:
    dataset, ramp = settings.dataset, settings.ramp
    rates = ", ".join(plots.rate_text(each.run.rate) for each in measured)
    rows: list[tuple[str, object]] = [
        ("Began", f"{measured[0].run.began:%Y-%m-%d %H:%M:%S %z}"),
        ("Endpoint", f"{settings.url}{settings.endpoint} ({settings.backend})"),
        ("Model", model),
        ("Data set", f"{dataset.name}, seed {dataset.seed}"),
        ("Requests", f"{settings.num_prompts} a run"),
        (
            "Arrivals",
            f"ramp from {ramp.start:g} to {ramp.end:g} req/s" if ramp else f"{rates}; burstiness {settings.burstiness:g}",
        ),
        ("Under way at most", settings.max_concurrency or "no limit"),
        ("Goodput limits", ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in settings.goodput.items()) or "none"),
        ("Counted as success", settings.success),
    ]
    if settings.compare is not None:
        rows.insert(2, ("Second endpoint", settings.compare))
    return _table("What was done", ("", ""), rows)


def _summary(settings: Settings, measured: Sequence[Measured]) -> str:
    head = ("Run", "Succeeded", "Failed", "Duration (s)", "Requests/s", "Goodput (req/s)", "Output tokens/s", "Tokens/s")
    rows = []
    for each in measured:
        for which, metrics in enumerate(each.metrics):
            goodput = "–" if metrics.request_goodput is None else f"{metrics.request_goodput:.2f}"
            rows.append(
                (
                    _name(settings, each, which),
                    metrics.completed,
                    metrics.failed,
                    f"{metrics.duration:.2f}",
                    f"{metrics.request_throughput:.2f}",
                    goodput,
                    f"{metrics.output_throughput:.1f}",
                    f"{metrics.total_token_throughput:.1f}",
                )
            )
    return _table("Requests and throughput", head, rows)


def _name(settings: Settings, measured: Measured, which: int) -> str:
    words = [plots.rate_text(measured.run.rate)]
    if len(settings.urls) > 1:
        words.append(("first", "second")[which])
    return ", ".join(words)


def _latencies(settings: Settings, measured: Measured, which: int, metrics: Metrics) -> str:
    percents = [percent for percent in settings.percentiles if percent != 50]
    head = ("ms", "Mean", "Median", *(word(percent).upper() for percent in percents), "Samples")
    rows = []
    for name in shown_metrics(settings, measured.run):
        values = getattr(metrics, name)
        at = dict(values.percentiles)
        shown = [values.mean, values.median, *(at[percent] for percent in percents)]
        rows.append((METRICS[name][0], *(f"{value * 1e3:.2f}" for value in shown), values.count))
    return _table(f"Latencies: {_name(settings, measured, which)}", head, rows)


def _added(measured: Measured) -> str:
    percents = [percent for percent, _ in measured.differences[0].percentiles]
    head = ("ms, with 95 % confidence", "Pairs", "Mean", *(word(percent).upper() for percent in percents))
    rows = [
        (each.name.upper(), each.pairs, _estimate(each.mean), *(_estimate(estimate) for _, estimate in each.percentiles))
        for each in measured.differences
    ]
    return _table(f"What the first endpoint adds, pair by pair: {plots.rate_text(measured.run.rate)}", head, rows)


def _estimate(estimate: Estimate) -> str:
    low, high = ("?" if end is None else f"{end * 1e3:+.2f}" for end in (estimate.low, estimate.high))
    return f"{estimate.value * 1e3:+.2f} [{low}, {high}]"


def _figures(settings: Settings, measured: Sequence[Measured]) -> Iterable[str]:
    for place, panel in enumerate(plots.panels(measured, settings)):
        yield f"<figure><figcaption>{_text(panel.title)}</figcaption>{plots.svg(panel, f'p{place}')}</figure>"


def _failures(measured: Sequence[Measured]) -> str:
    records = [record for each in measured for own in each.run.records for record in own]
    rows = errors(records)
    if not rows:
        return ""
    return "<h2>Failures</h2>" + _table(
        "The most frequent", ("Error", "Requests"), [(text[:200], count) for text, count in rows]
    )
