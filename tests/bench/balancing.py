"""What each balancing policy does to model engines: `python -m tests.bench.balancing` prints a table and draws
deploy/balancing.svg. The same figures on every machine (tests/support/simulation.py).
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from gateway.core.pool import Pool
from tests.support.engines import Engine
from tests.support.simulation import Result, Simulation, Workload, by_last_scrape_alone, quantile

DRAWN = Path(__file__).resolve().parents[2] / "deploy" / "balancing.svg"
POLICIES = ("round_robin", "power_of_two", "least_loaded", "affinity")
COLOURS = dict(zip(POLICIES, ("#8a8f98", "#c98a2b", "#2f6fb3", "#2e8b57"), strict=True))
STALE = "by the last scrape alone"
SEEDS = range(1, 6)


def conversations(balance: str) -> list[Result]:
    """Four engines at about four fifths of what they can do."""
    load = Workload(rate=9.0, seconds=90.0)
    return [Simulation([Engine() for _ in range(4)], balance, seed=seed, workload=load).run() for seed in SEEDS]


def herd(prepare: Callable[[Pool], None] | None) -> Result:
    """Eight engines, looked at once a second, for half a minute."""
    fleet = [Engine() for _ in range(8)]
    return Simulation(fleet, "least_loaded", workload=Workload(rate=18.0, seconds=35.0), prepare=prepare).run()


def pooled(results: list[Result], share: float, values: Callable[[Result], list[float]]) -> float:
    return quantile([value for result in results for value in values(result)], share)


def main() -> None:
    found = {balance: conversations(balance) for balance in POLICIES}
    print("| | prefix hits | TTFT p50 | p99 | TPOT p50 | p99 | largest share | fullest engine, p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for balance, results in found.items():
        hits = statistics.mean(result.hit_rate for result in results)
        skew = statistics.mean(result.skew for result in results)
        ttft = [pooled(results, share, lambda r: r.ttft) * 1000 for share in (0.5, 0.99)]
        tpot = [pooled(results, share, lambda r: r.tpot) * 1000 for share in (0.5, 0.99)]
        fullest = pooled(results, 0.99, lambda r: r.fullest)
        print(
            f"| `{balance}` | {hits:.0%} | {ttft[0]:.0f} ms | {ttft[1]:.0f} ms | {tpot[0]:.1f} ms | {tpot[1]:.1f} ms | "
            f"{skew:.2f} | {fullest:.2f} |"
        )
    draw(found, {"least_loaded": herd(None), STALE: herd(by_last_scrape_alone)})
    print(f"{DRAWN}: {DRAWN.stat().st_size} octets", file=sys.stderr)


def draw(found: dict[str, list[Result]], herds: dict[str, Result]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tokenpipe", "font.size": 9, "axes.spines.top": False,
                            "axes.spines.right": False})  # fmt: skip
    figure, ((hits, ttft), (last, own)) = pyplot.subplots(2, 2, figsize=(9, 5.6), layout="constrained")
    shares = [statistics.mean(result.hit_rate for result in found[balance]) for balance in POLICIES]
    bars = hits.barh(POLICIES, shares, color=[COLOURS[balance] for balance in POLICIES])
    hits.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3)
    hits.set(title="prompt tokens found in the prefix cache", xlim=(0, 1), xticks=())
    for balance in POLICIES:
        marks = [step / 200 for step in range(200)]
        times = [pooled(found[balance], mark, lambda r: r.ttft) * 1000 for mark in marks]
        ttft.plot(times, marks, color=COLOURS[balance], label=balance)
    ttft.set(title="time to first token, milliseconds", xlim=(0, 150), ylabel="share of requests")
    ttft.legend(frameon=False)
    for axes, (name, result) in zip((own, last), herds.items(), strict=True):
        points = result.in_engines[::5]
        for place in range(8):
            axes.plot([when for when, _ in points], [held[place] for _, held in points], linewidth=0.8)
        axes.set(title=f"requests in each of 8 engines: {name}", ylim=(0, 90), xlabel="seconds", xlim=(15, 35))
    figure.savefig(DRAWN, metadata={"Date": None})
    text = re.sub(r"\s+$", "", DRAWN.read_text(), flags=re.M)
    DRAWN.write_text(re.sub(r"(\d+\.\d)\d+", r"\1", text) + "\n")


if __name__ == "__main__":
    main()
