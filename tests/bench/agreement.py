"""The same run seen by three load testers, direct and through the gateway: `python -m tests.bench.agreement`.

`tokenpipe loadtest`, `vllm bench serve` and `evalscope perf` (what of the two is installed) load the synthetic upstream,
which before each run begins anew with the same seed, so that every one of them meets the same answers at the same times;
or, with --url, an engine that runs already: no two runs of that are the same, and each tool is set beside what the gateway
counted of the very same requests. A round is one run of each tool each way, in an order that turns from round to
round; what is compared is compared within a round, and the median over the rounds is shown. Printed is Markdown, the table of
gateway/loadtest/README.md, which says what each difference comes from.

A tool's command line is the one that a user would write, and the figures are those that the tool itself reports. The
gateway's histograms are read after each run through it, and set beside what that tool says.

Exit status 1 if figures that mean the same differ by more than 5 %, if tokens are not the same to the last one, if a
histogram's quantile lies more than a bucket from the client's (the median of the rounds, likewise), or if EvalScope had
anything to say about usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.loadtest.datasets import WORDS, Dataset, prompts

ROOT = Path(__file__).resolve().parents[2]
PATHS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions", "openai-responses": "/v1/responses"}
EVALSCOPE = {"openai-responses": "openai_responses"}  # its --api; `openai` for both of the others
PROMPT = 32  # words, and so tokens, of a prompt
NEAR = 0.05  # of a figure: what may lie between two tools that mean the same by it
QUANTILES = (50, 90, 99)

Figures = dict[str, float]  # milliseconds; requests and tokens, and their rates a second

# What a row shows, and the tools that mean by it what `tokenpipe loadtest` means (gateway/loadtest/README.md has the others).
BOTH, VLLM, NONE = ("vllm", "evalscope"), ("vllm",), ()
ROWS: dict[str, Sequence[str]] = {
    "TTFT mean": BOTH,
    "TTFT p50": BOTH,
    "TTFT p99": NONE,  # EvalScope: nearest rank; and a tail of few requests is the machine's
    "TPOT mean": BOTH,
    "ITL mean": NONE,  # vLLM up to 0.32 takes the role chunk for a token; EvalScope leaves out empty deltas
    "ITL p50": BOTH,
    "ITL p99": NONE,
    "E2EL mean": BOTH,
    "requests/s": BOTH,
}
EXACT = ("completed", "input tokens", "output tokens")
# The client's figures that the gateway has a histogram of, too. vLLM's ITL of chat has a 0 in it for each request, which
# moves no quantile here by a bucket.
HISTOGRAMS = {
    "TTFT": "tokenpipe_time_to_first_token_seconds",
    "TPOT": "tokenpipe_time_per_output_token_seconds",
    "ITL": "tokenpipe_inter_token_latency_seconds",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: what the synthetic upstream does, and what it is asked. `concurrency` at once, or `rate` a second.

    `apart`: rows that are shown and not judged, for the case is there to show how far the tools are apart in them.
    """

    name: str
    kind: str
    concurrency: int | None
    requests: int
    tokens: int = 64
    ttft: str = "0.2"
    itl: str = "0.02"
    rate: float | None = None
    knobs: tuple[str, ...] = ()  # `--set` of the synthetic upstream
    apart: tuple[str, ...] = ()
    cold: bool = False  # no requests before, so that the gateway's means are of the same requests as the client's

    @property
    def warmups(self) -> int:
        return 0 if self.cold else self.concurrency or 8


CASES = (
    Case("chat, 1 at once", "openai-chat", 1, 12),
    Case("chat, 8 at once", "openai-chat", 8, 48),
    # A whole wave begins in one instant. A client that takes half a millisecond to send a request sends the last one late.
    Case("chat, 32 at once, in step", "openai-chat", 32, 128, apart=("TTFT mean", "TTFT p50")),
    Case("chat, 32 at once, drawn times", "openai-chat", 32, 192, 64, "lognormal:0.2:0.3", "lognormal:0.02:0.5"),
    Case("completions, 8 at once", "openai", 8, 48),
    Case("responses, 8 at once", "openai-responses", 8, 48),
    Case("chat, 8 at once, drawn times", "openai-chat", 8, 48, 64, "lognormal:0.2:0.3", "lognormal:0.02:0.5"),
    Case("chat, 8 at once, 8 tokens", "openai-chat", 8, 96, 8),
    Case("chat, 20 a second", "openai-chat", None, 160, rate=20.0),
    Case("chat, 8 at once, tokens without text", "openai-chat", 8, 24, knobs=("text=multibyte",),
         apart=("TTFT mean", "TTFT p50", "TPOT mean", "ITL p50")),
    Case("chat, 8 at once, role chunk at once", "openai-chat", 8, 24, knobs=("role=early",),
         apart=("TTFT mean", "TTFT p50", "TPOT mean")),
)  # fmt: skip
ENGINE_CASES = (
    Case("engine, chat, 1 at once", "openai-chat", 1, 40, cold=True),
    Case("engine, chat, 4 at once", "openai-chat", 4, 80, cold=True),
    Case("engine, completions, 4 at once", "openai", 4, 80, cold=True),
)


# -- the tools


class Tool:
    """A load tester: how it is called, and where in its own result its figures are."""

    name = shown = ""

    def __init__(self, program: Sequence[str], model: str, folder: Path):
        self.program, self.model, self.folder = list(program), model, folder

    def command(self, url: str, case: Case, out: Path) -> list[str]:
        raise NotImplementedError

    def read(self, out: Path) -> Figures:
        raise NotImplementedError

    def run(self, url: str, case: Case, out: Path) -> Figures:
        out.mkdir(parents=True)
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        command = self.command(url, case, out)
        with open(out / "log", "wb") as log:
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, stdout=log, stderr=log, timeout=900)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{(out / 'log').read_text()[-3000:]}")
        return self.read(out)


class Loadtest(Tool):
    name, shown = "loadtest", "`tokenpipe loadtest`"

    def command(self, url: str, case: Case, out: Path) -> list[str]:
        return [*self.program, "--base-url", url, *self.flags(case, out)]

    def flags(self, case: Case, out: Path) -> list[str]:
        """Those of `vllm bench serve`, word for word."""
        load = ["--request-rate", str(case.rate)] if case.rate else ["--max-concurrency", str(case.concurrency)]
        return [
            *load, "--backend", case.kind, "--endpoint", PATHS[case.kind], "--model", self.model, "--dataset-name", "random",
            "--random-input-len", str(PROMPT), "--random-output-len", str(case.tokens), "--num-prompts", str(case.requests),
            "--num-warmups", str(case.warmups), "--seed", "7",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", ",".join(map(str, QUANTILES)),
            "--disable-tqdm", "--save-result", "--result-dir", str(out), "--result-filename", "result.json",
        ]  # fmt: skip

    def read(self, out: Path) -> Figures:
        found = json.loads((out / "result.json").read_text())
        figures = {
            "completed": found["completed"], "requests/s": found["request_throughput"],
            "input tokens": found["total_input_tokens"], "output tokens": found["total_output_tokens"],
        }  # fmt: skip
        for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
            figures[f"{metric} mean"] = found[f"mean_{metric.lower()}_ms"]
            figures |= {f"{metric} p{at}": found[f"p{at}_{metric.lower()}_ms"] for at in QUANTILES}
        return figures


class VllmBench(Loadtest):
    name, shown = "vllm", "`vllm bench serve`"

    def command(self, url: str, case: Case, out: Path) -> list[str]:
        return [*self.program, "--base-url", url, "--tokenizer", str(self.tokenizer()), *self.flags(case, out)]

    def tokenizer(self) -> Path:
        """It reports no TTFT without one. Of this one each word is a token, as the synthetic upstream has it."""
        folder = self.folder / "tokenizer"
        if not folder.is_dir():
            folder.mkdir()
            words = {word: number for number, word in enumerate(("?", *WORDS))}
            model = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
            whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
            (folder / "tokenizer.json").write_text(json.dumps(whole))
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}')
            (folder / "config.json").write_text('{"model_type": "gpt2"}')
        return folder


class EvalScope(Tool):
    name, shown = "evalscope", "`evalscope perf`"

    def command(self, url: str, case: Case, out: Path) -> list[str]:
        lines = out / "prompts.txt"
        texts = prompts(Dataset(random_input_len=PROMPT, seed=7), case.warmups + case.requests)
        lines.write_text("".join(f"{each.text}\n" for each in texts))
        load = ["--open-loop", "--rate", str(case.rate)] if case.rate else ["--parallel", str(case.concurrency)]
        return [
            *self.program, *load, "--url", url + PATHS[case.kind], "--api", EVALSCOPE.get(case.kind, "openai"),
            "--model", self.model, "--dataset", "custom", "--dataset-path", str(lines), "--number", str(case.requests),
            "--warmup-num", str(case.warmups), "--max-tokens", str(case.tokens), "--extra-args", '{"ignore_eos": true}',
            "--no-test-connection", "--outputs-dir", str(out), "--no-timestamp",
        ]  # fmt: skip

    def read(self, out: Path) -> Figures:
        (summary,) = (json.loads(path.read_text()) for path in out.rglob("benchmark_summary.json"))
        (rows,) = (json.loads(path.read_text()) for path in out.rglob("benchmark_percentile.json"))
        by_percent = {row["Percentiles"]: row for row in rows}
        done = summary["Success Requests"]
        figures = {
            "completed": done, "requests/s": summary["Req Throughput (req/s)"],
            "input tokens": summary["Avg Input Tokens"] * done, "output tokens": summary["Avg Output Tokens"] * done,
            "E2EL mean": summary["Avg Latency (s)"] * 1e3,
            "usage errors": usage_errors((out / "log").read_text()),
        }  # fmt: skip
        for metric in ("TTFT", "TPOT", "ITL"):
            figures[f"{metric} mean"] = summary[f"Avg {metric} (ms)"]
            figures |= {f"{metric} p{at}": by_percent[f"{at}%"][f"{metric} (ms)"] for at in QUANTILES}
        return figures


def usage_errors(log: str) -> int:
    """What EvalScope says where it finds no usage in an answer, or no answer."""
    return len(re.findall(r"parse usage from response|retrieve usage information|empty response list", log))


# -- the processes


@contextlib.contextmanager
def running(words: Sequence[str], log: Path) -> Iterator[list[str]]:
    """A command of tokenpipe's, from when it listens; the addresses that it names. What it says goes to a file: a pipe
    that nobody reads would stop it once the access log has filled it."""
    with open(log, "wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "gateway", *words], cwd=ROOT, stdout=file, stderr=file)
    try:
        while not (found := re.findall(r"(?:listening|admin) on (http://[^\s,]+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(f"tokenpipe {' '.join(words)} ended: {log.read_text()}")
            time.sleep(0.05)
        yield found
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def endpoint(case: Case, engine: str | None, model: str, way: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Where a tool is to send its load, and where the gateway's metrics are, if it is in between."""
    with contextlib.ExitStack() as stack:
        backend = engine
        if backend is None:
            words = ["mock", "--port", "0", "--model", model, "--ttft", case.ttft, "--itl", case.itl]
            words += [word for knob in case.knobs for word in ("--set", knob)]
            (backend,) = stack.enter_context(running(words, folder / "mock.log"))
        if way == "direct":
            yield backend, None
            return
        words = ["serve", "--port", "0", "--admin-port", "0", "--backend", backend, "--log-level", "error"]
        url, admin = stack.enter_context(running(words, folder / "gateway.log"))
        yield url, admin


# -- the gateway's histograms


@dataclasses.dataclass
class Observed:
    """A histogram, summed over its labels: edges in milliseconds, how many are not above each, and the sum of all."""

    cumulative: dict[float, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    total: float = 0.0

    @property
    def edges(self) -> list[tuple[float, float]]:
        return sorted(self.cumulative.items())

    @property
    def mean(self) -> float:
        return self.total / max(self.cumulative.values())


def scrape(admin: str) -> dict[str, Observed]:
    with urllib.request.urlopen(f"{admin}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    found = {metric: Observed() for metric in HISTOGRAMS}
    names = {name: metric for metric, name in HISTOGRAMS.items()}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if family.name in names and sample.name.endswith("_bucket"):
                found[names[family.name]].cumulative[float(sample.labels["le"]) * 1e3] += sample.value
            elif family.name in names and sample.name.endswith("_sum"):
                found[names[family.name]].total += sample.value * 1e3
    return {metric: seen for metric, seen in found.items() if seen.cumulative}


def distance(edges: Sequence[tuple[float, float]], percent: float, value: float) -> int:
    """How many buckets lie between the histogram's quantile and a client's value: 0, both are in the same one."""
    wanted = edges[-1][1] * percent / 100
    ours = next(place for place, (_, count) in enumerate(edges) if count >= wanted and count)
    return abs(ours - bisect_left([edge for edge, _ in edges], value))


# -- rounds


@dataclasses.dataclass
class Found:
    """What came of all rounds of a case: of each tool and way its figures, one a round.

    `means`: of each tool and metric the client's mean and that of the gateway's histogram of the same run.
    """

    case: Case
    figures: dict[tuple[str, str], list[Figures]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    distances: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)  # tool, figure, buckets
    means: dict[tuple[str, str], list[tuple[float, float]]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def median(self, tool: str, way: str, row: str) -> float:
        return statistics.median(each[row] for each in self.figures[tool, way])

    def deviation(self, tool: str, way: str, row: str) -> float:
        """From `tokenpipe loadtest` in the same round, the same way."""
        pairs = zip(self.figures[tool, way], self.figures[Loadtest.name, way], strict=True)
        return statistics.median(theirs[row] / ours[row] - 1 for theirs, ours in pairs)

    def added(self, tool: str, row: str) -> float:
        """By the gateway, as this tool sees it."""
        pairs = zip(self.figures[tool, "gateway"], self.figures[tool, "direct"], strict=True)
        return statistics.median(through[row] - direct[row] for through, direct in pairs)


def measure(case: Case, tools: Sequence[Tool], rounds: int, engine: str | None, model: str, folder: Path) -> Found:
    found = Found(case)
    ways = ("gateway",) if engine else ("direct", "gateway")  # no two runs of an engine are the same
    runs = [(tool, way) for tool in tools for way in ways]
    for number in range(rounds):
        turn = number % len(runs)
        for tool, way in runs[turn:] + runs[:turn]:
            print(f"{case.name}, round {number + 1} of {rounds}: {tool.name}, {way}", file=sys.stderr, flush=True)
            out = folder / re.sub(r"\W+", "-", case.name) / f"{number}-{tool.name}-{way}"
            with endpoint(case, engine, model, way, folder) as (url, admin):
                figures = tool.run(url, case, out)
                found.figures[tool.name, way].append(figures)
                for metric, seen in (scrape(admin) if admin else {}).items():
                    found.means[tool.name, metric].append((figures[f"{metric} mean"], seen.mean))
                    found.distances += [
                        (tool.name, f"{metric} p{at}", distance(seen.edges, at, figures[f"{metric} p{at}"])) for at in QUANTILES
                    ]
    return found


# -- what it comes to


def table(all_found: Sequence[Found], tools: Sequence[Tool]) -> Iterator[str]:
    others = [tool for tool in tools if tool.name != Loadtest.name]
    columns = [f"{Loadtest.shown} direct", "gateway"]
    columns += [head for tool in others for head in (f"{tool.shown} direct", "gateway")]
    for found in all_found:
        case = found.case
        yield f"\n**{case.name}**: TTFT {case.ttft} s, ITL {case.itl} s, {case.tokens} tokens, {case.requests} requests\n"
        yield f"| | {' | '.join(columns)} |"
        yield f"|---|{'---|' * len(columns)}"
        for row in ROWS:
            cells = [f"{found.median(Loadtest.name, way, row):.2f}" for way in ("direct", "gateway")]
            for tool in others:
                cells += [f"{found.deviation(tool.name, way, row):+.1%}" for way in ("direct", "gateway")]
            yield f"| {row} | {' | '.join(cells)} |"


def added(all_found: Sequence[Found], tools: Sequence[Tool]) -> Iterator[str]:
    yield "\n**What the gateway adds, in ms, as each tool sees it**\n"
    columns = [f"{tool.shown} {row}" for tool in tools for row in ("TTFT p50", "E2EL mean")]
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for found in all_found:
        cells = [f"{found.added(tool.name, row):+.2f}" for tool in tools for row in ("TTFT p50", "E2EL mean")]
        yield f"| {found.case.name} | {' | '.join(cells)} |"


def histograms(all_found: Sequence[Found]) -> Iterator[str]:
    yield "\n**The gateway's histograms beside the clients: buckets between the two quantiles**\n"
    yield "| | same bucket | the next one | further off |"
    yield "|---|---|---|---|"
    counted: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for found in (each for each in all_found if not each.case.knobs):
        for _, figure, apart in found.distances:
            counted[figure][min(apart, 2)] += 1
    for figure, counts in counted.items():
        yield f"| {figure} | {' | '.join(map(str, counts))} |"


def same_run(all_found: Sequence[Found], tools: Sequence[Tool]) -> Iterator[str]:
    yield "\n**A client's mean beside the gateway's of the same requests, in ms**\n"
    yield f"| | {' | '.join(tool.shown for tool in tools)} |"
    yield f"|---|{'---|' * len(tools)}"
    for found in all_found:
        for metric in HISTOGRAMS:
            cells = []
            for tool in tools:
                pairs = found.means[tool.name, metric] or [(math.nan, math.nan)]  # none: no stream had one
                client, gateway = map(statistics.median, zip(*pairs, strict=True))
                apart = statistics.median(c / g - 1 for c, g in pairs)
                cells.append(f"{client:.2f} / {gateway:.2f} ({apart:+.1%})")
            yield f"| {found.case.name}: {metric} | {' | '.join(cells)} |"


def complaints(all_found: Sequence[Found], synthetic: bool) -> Iterator[str]:
    """What does not hold. Two runs of an engine are not the same run, and its tokenizer makes other numbers of each tool's
    prompts: what is asked of them is only that tokens are those that were asked for."""
    exact = EXACT if synthetic else [row for row in EXACT if row != "input tokens"]
    for found in all_found:
        for (tool, way), rounds in found.figures.items():
            where = f"{found.case.name}, {tool}, {way}"
            reference = found.figures[Loadtest.name, way]
            for row in exact:
                yield from (
                    f"{where}: {row}: {theirs[row]:g}, {ours[row]:g} in loadtest"
                    for theirs, ours in zip(rounds, reference, strict=True)
                    if abs(theirs[row] - ours[row]) > 1e-6 * ours[row]
                )
            if errors := sum(each.get("usage errors", 0) for each in rounds):
                yield f"{where}: {errors:g} complaints about usage"
            for row, same in ROWS.items() if synthetic else ():
                if tool in same and row not in found.case.apart and abs(apart := found.deviation(tool, way, row)) > NEAR:
                    yield f"{where}: {row}: {apart:+.1%} from loadtest"
        apart_by = defaultdict(list)
        for tool, figure, steps in found.distances:
            apart_by[tool, figure].append(steps)
        for (tool, figure), steps_of_rounds in apart_by.items():
            if not found.case.apart and (steps := statistics.median(steps_of_rounds)) > 1:
                yield f"{found.case.name}, {tool}: {figure}: {steps:g} buckets from the gateway's histogram"


def as_json(all_found: Sequence[Found]) -> list[Mapping[str, Any]]:
    return [
        {
            "case": dataclasses.asdict(found.case),
            "rounds": [{"tool": tool, "way": way, "figures": rounds} for (tool, way), rounds in found.figures.items()],
            "buckets": found.distances,
        }
        for found in all_found
    ]  # fmt: skip


def installed(given: argparse.Namespace, folder: Path) -> list[Tool]:
    tools: list[Tool] = [Loadtest([sys.executable, "-m", "gateway", "loadtest"], given.model, folder)]
    for kind, name, words in ((VllmBench, given.vllm, ["bench", "serve"]), (EvalScope, given.evalscope, ["perf"])):
        program = shutil.which(name)
        if program is None:
            print(f"{name} is not installed here: left out", file=sys.stderr)
        else:
            tools.append(kind([program, *words], given.model, folder))
    return tools


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="vllm", help="the program [on the path]")
    parser.add_argument("--evalscope", default="evalscope", help="the program [on the path]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds it")
    parser.add_argument("--url", help="an engine that runs already, instead of the synthetic upstream")
    parser.add_argument("--model", default="synthetic", help="its model [synthetic]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all rounds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = installed(given, folder)
        cases = [case for case in (ENGINE_CASES if given.url else CASES) if given.only in case.name]
        all_found = [measure(case, tools, given.rounds, given.url, given.model, folder) for case in cases]
    for shown in (same_run,) if given.url else (table, added):
        print(*shown(all_found, tools), sep="\n")
    print(*histograms(all_found), sep="\n")
    if given.json:
        given.json.write_text(json.dumps(as_json(all_found), indent=1))
    found = list(complaints(all_found, given.url is None))
    print("", *found or ["Same meaning: within 5 %. Tokens: the same to the last one. Histograms: within a bucket."], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
