"""The text of a scrape, in both of Prometheus's formats: families, samples, histograms, escapes.

Text format 0.0.4 and OpenMetrics 1.0.0 differ in three things only: the latter names a counter's family without its
`_total`, may have exemplars, and has an end. A histogram of thirty lines is one join and one `%`, since a large gateway
has thousands of them at each scrape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from gateway.telemetry.histogram import Edges, Exemplar, Histogram

# Prometheus 3 fails the scrape over a content type that it cannot read.
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


def wants_openmetrics(accept: str | None) -> bool:
    """Whether OpenMetrics is asked for by name, and text not preferred. A wildcard is no name."""
    best = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in (accept or "").lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        fields = dict(part.split("=", 1) for part in parameters if "=" in part)
        # Of OpenMetrics we have 1.0.0 only, which a reader of 0.0.1 or 2.0.0 need not understand.
        if name in best and (name == "text/plain" or fields.get("version", "1.0.0").strip('"') == "1.0.0"):
            best[name] = max(best[name], _quality(fields.get("q", "1")))
    wanted = best["application/openmetrics-text"]
    return wanted > 0 and wanted >= best["text/plain"]


def _quality(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def labels(names: Iterable[str], values: Iterable[object]) -> str:
    """`model="llama",backend="b1"`; of no names, nothing."""
    return ",".join([f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)])


class Page:
    """One scrape in one format. Every method returns whole lines; names are given without the `_total` of a counter."""

    __slots__ = ("openmetrics",)

    def __init__(self, openmetrics: bool):
        self.openmetrics = openmetrics

    @property
    def content_type(self) -> str:
        return OPENMETRICS if self.openmetrics else TEXT

    @property
    def end(self) -> str:
        return "# EOF\n" if self.openmetrics else ""

    def family(self, name: str, kind: str, help_: str) -> str:
        """What stands above a family's samples. `kind`: counter, gauge, histogram."""
        if kind == "counter" and not self.openmetrics:
            name += "_total"
        help_ = help_.replace("\\", "\\\\").replace("\n", "\\n")
        return f"# HELP {name} {help_}\n# TYPE {name} {kind}\n"

    def histogram(self, name: str, inside: str, histogram: Histogram) -> str:
        """`inside`: its labels, as `labels` writes them."""
        cumulative = histogram.cumulative()
        before = inside.replace("%", "%%") + "," if inside else ""
        text = before.join(_buckets(name, histogram.edges)) % cumulative
        if histogram.exemplars is not None and self.openmetrics:
            text = _with_exemplars(text, histogram.exemplars)
        braces = f"{{{inside}}}" if inside else ""
        return f"{text}{name}_count{braces} {cumulative[-1]}\n{name}_sum{braces} {histogram.sum!r}\n"


def sample(name: str, inside: str, value: float) -> str:
    return f"{name}{{{inside}}} {value!r}\n" if inside else f"{name} {value!r}\n"


@functools.lru_cache(maxsize=64)  # there is one of each family
def _buckets(name: str, edges: Edges) -> Sequence[str]:
    """The lines of the buckets, cut where a series' own labels belong, with a `%d` for each number."""
    ends = [f'le="{edge!r}"}} %d\n' for edge in edges] + ['le="+Inf"} %d\n']
    return (f"{name}_bucket{{", *[f"{end}{name}_bucket{{" for end in ends[:-1]], ends[-1])


def _with_exemplars(text: str, exemplars: dict[int, Exemplar]) -> str:
    lines = text.splitlines()
    for bucket, (trace_id, value, at) in exemplars.items():
        lines[bucket] += f' # {{trace_id="{trace_id}"}} {value!r} {at:.3f}'
    return "\n".join(lines) + "\n"
