"""Figures from records made by hand, and vLLM's formulas beside ours."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from random import Random

import pytest

from gateway.core.outcome import Outcome
from gateway.loadtest.compare import Difference, compare, ranks, student
from gateway.loadtest.endpoints import Kind
from gateway.loadtest.records import Record, Run, Watch
from gateway.loadtest.results import Measured, as_json, result_path, save, table
from gateway.loadtest.statistics import check_tester, errors, measure, percentile, spread, success_rule
from tests.loadtest.support import record, settings

STRICT = success_rule("strict", Kind.CHAT)
NOW = datetime(2026, 12, 1, 6, 28, 10, tzinfo=UTC)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(size: int) -> None:
    numpy = pytest.importorskip("numpy")
    values = [Random(size).expovariate(1) for _ in range(size)]
    about = spread(values, (1, 50, 99, 99.9))
    for percent, value in about.percentiles:
        assert value == pytest.approx(numpy.percentile(values, percent))
    assert (about.mean, about.median) == pytest.approx((numpy.mean(values), numpy.median(values)))
    assert about.std == pytest.approx(numpy.std(values))


def test_of_nothing() -> None:
    about = spread([], (99,))
    assert (about.count, about.mean, about.median, about.std, about.percentiles) == (0, 0.0, 0.0, 0.0, ((99, 0.0),))
    assert percentile([], 50) == 0.0
    assert measure([], 0.0, STRICT).request_throughput == 0.0


def test_vllms_formulas() -> None:
    records = [
        record(0, started=1.0, events=[1.1, 1.2, 1.3], tokens=5, prompt_tokens=7, ended=1.4),
        record(1, started=2.0, events=[2.5], tokens=1),
        record(2, started=3.0, events=[3.2], outcome=Outcome.UPSTREAM_RESET),
    ]
    metrics = measure(records, 4.0, STRICT, (99,))
    assert (metrics.completed, metrics.failed) == (2, 1)
    assert (metrics.total_input, metrics.total_output) == (7 + 10, 5 + 1)
    assert metrics.ttft.ordered == pytest.approx([0.1, 0.5])
    assert metrics.tpot.ordered == pytest.approx([0.05])  # (0.3 - 0.1) / (5 - 1); a single token has none
    assert metrics.itl.ordered == pytest.approx([0.1, 0.1])
    assert metrics.e2el.ordered == pytest.approx([0.3, 0.5])  # to the last output event
    assert metrics.duration_to_end.ordered == pytest.approx([0.4, 0.5])
    assert (metrics.request_throughput, metrics.output_throughput, metrics.total_token_throughput) == (0.5, 1.5, 23 / 4)
    assert metrics.prompt_sources == {"estimated": 10, "usage": 7}
    assert metrics.outcomes == {"complete": 2, "upstream_reset": 1}


def test_goodput_is_vllms() -> None:
    records = [
        record(0, events=[0.1, 0.2, 0.3]),
        record(1, events=[0.3, 0.4, 0.5]),  # too late a first token
        record(2, events=[0.1]),  # a single token: its TPOT counts as 0
        record(3, events=[0.1, 0.5]),  # too slow
        record(4, events=[0.1, 0.2], outcome=Outcome.UPSTREAM_TRUNCATED),
    ]
    assert measure(records, 2.0, STRICT, goodput={"ttft": 0.2, "tpot": 0.15}).request_goodput == 1.0
    assert measure(records, 2.0, STRICT, goodput={"e2el": 0.5}).request_goodput == 2.0
    assert measure(records, 2.0, STRICT).request_goodput is None


def test_success_as_vllm_has_it() -> None:
    lenient = success_rule("vllm", Kind.CHAT)
    with_output, without = record(events=[1.0]), record()
    for outcome in (Outcome.COMPLETE, Outcome.STREAM_ERROR, Outcome.UPSTREAM_TRUNCATED):
        with_output.outcome = without.outcome = outcome
        assert lenient(with_output)
        assert not lenient(without)
        assert STRICT(with_output) is (outcome is Outcome.COMPLETE)
        assert success_rule("vllm", Kind.RESPONSES)(with_output) is (outcome is Outcome.COMPLETE)
    with_output.outcome = Outcome.UPSTREAM_RESET
    assert not lenient(with_output)


def test_peaks_go_by_whole_seconds() -> None:
    records = [record(0, started=10.0, events=[10.2, 10.4, 11.5]), record(1, started=10.9, events=[11.1, 11.2])]
    metrics = measure(records, 3.0, STRICT)
    assert metrics.max_output_tokens_per_s == 3  # 11.1, 11.2 and 11.5
    assert metrics.max_concurrent_requests == 2


def test_what_ctrl_c_cut_is_neither() -> None:
    records = [record(0, events=[0.1]), record(1, outcome=Outcome.CLIENT_GONE, error="interrupted")]
    metrics = measure(records, 1.0, STRICT)
    assert (metrics.completed, metrics.failed, metrics.abandoned) == (1, 0, 1)
    assert errors(records) == []


# -- the tester itself


def run_of(records: list[Record], *, rate: float = 10.0, lags: list[float] | None = None, cpu: float = 0.1) -> Run:
    watch = Watch(lags or [0.0005] * 100, cpu, 1.0)
    return Run(rate, len(records), [records], NOW, 1.0, watch)


def test_nothing_is_in_doubt() -> None:
    check = check_tester(run_of([record(n, started=n / 10, events=[n / 10 + 0.1, n / 10 + 0.12]) for n in range(1, 11)]))
    assert check.doubts == ()
    assert check.arrival_rate == pytest.approx(10.0)


def test_it_says_when_its_own_machine_was_the_limit() -> None:
    steady = [record(n, started=n / 10, events=[n / 10 + 0.1, n / 10 + 0.12]) for n in range(1, 11)]
    (doubt,) = check_tester(run_of(steady, lags=[0.03] * 100)).doubts
    assert doubt == (
        "its event loop was late by 30.0 ms at the 99th percentile, which is more than 5.0 ms (the median ITL is 20.0 ms)"
    )
    (doubt,) = check_tester(run_of(steady, cpu=0.97)).doubts
    assert doubt == "it was busy for 97% of one core"
    for each in steady:
        each.arrived = each.scheduled + 0.05
    (doubt,) = check_tester(run_of(steady)).doubts
    assert doubt.startswith("it sent requests up to 50.0 ms after their time")
    for each in steady:
        each.scheduled = 0.0
    assert check_tester(run_of(steady, rate=math.inf)).doubts == ()  # all at once: to send them takes its time


# -- comparing


def test_student() -> None:
    """Against the tables."""
    assert [student(freedom) for freedom in (5, 10, 30, 120)] == pytest.approx([2.571, 2.228, 2.042, 1.980], abs=1e-3)


def test_ranks() -> None:
    """Against the tables of the sign test: of 20 values the 6th and the 15th hold the median with 95 % confidence."""
    assert ranks(20, 50.0) == (5, 14)
    assert ranks(6, 50.0) == (0, 5)
    assert ranks(5, 50.0) == (None, None)
    assert ranks(20, 99.0) == (18, None)  # below the last but one with a chance of 1.7 %; above all 20 with 82 %


def test_the_ranks_hold_the_quantile() -> None:
    random, held = Random(11), 0
    low, high = ranks(60, 90.0)
    assert low is not None and high is not None
    for _ in range(2000):
        ordered = sorted(random.random() for _ in range(60))
        held += ordered[low] <= 0.9 <= ordered[high]
    assert held / 2000 >= 0.94


def pair(index: int, random: Random, added: float) -> tuple[Record, Record]:
    drift = random.random()  # what both requests of a pair see
    times = [(drift + random.gauss(0.1, 0.001) + more, drift + 0.2 + more) for more in (added, 0.0)]
    return record(index, events=list(times[0])), record(index, events=list(times[1]))


def test_what_the_first_adds() -> None:
    random = Random(2)
    pairs = [pair(index, random, 0.005) for index in range(400)]
    pairs[0][1].outcome = Outcome.UPSTREAM_RESET  # a pair that does not count
    by_name = {d.name: d for d in compare([one for one, _ in pairs], [other for _, other in pairs], STRICT)}
    assert set(by_name) == {"ttft", "tpot", "itl", "e2el", "duration"}
    ttft = by_name["ttft"]
    assert ttft.pairs == 399
    assert ttft.mean.value == pytest.approx(0.005, abs=0.0003)
    for estimate in (ttft.mean, dict(ttft.percentiles)[50.0]):
        assert estimate.low is not None and estimate.high is not None
        assert 0.0045 < estimate.low < estimate.value < estimate.high < 0.0055  # the drift of half a second is out


def test_too_few_pairs_have_no_interval() -> None:
    (ttft, *_) = compare([record(0, events=[0.3])], [record(0, events=[0.1])], STRICT)
    assert (ttft.pairs, ttft.mean.value, ttft.mean.low, ttft.mean.high) == (1, pytest.approx(0.2), None, None)


# -- the result


def measured(records: list[Record], *words: str, differences: tuple[Difference, ...] = ()) -> Measured:
    given = settings(*words)
    run = run_of(records)
    metrics = measure(records, run.duration, STRICT, given.percentiles, given.goodput)
    return Measured(run, (metrics,), STRICT, check_tester(run), differences)


_FIELDS = (
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration"
    " completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput"
    " total_token_throughput latencies queue_times max_output_tokens_per_s max_concurrent_requests rtfx"
)
VLLM_FIELDS = _FIELDS.split()
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
SPREAD = ("mean", "median", "std", "p50", "p99", "p99.9")


def test_the_json_has_vllms_fields() -> None:
    records = [record(0, events=[0.1, 0.2]), record(1, events=[], outcome=Outcome.UPSTREAM_STATUS, status=500, error="no")]
    words = ("--metric-percentiles", "50,99,99.9", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metadata", "tp=2")
    result = as_json(settings(*words), "org/model", measured(records, *words))
    aggregates = [f"{p}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for p in SPREAD]
    assert list(result) == [*VLLM_FIELDS[:7], "tp", *VLLM_FIELDS[7:], *aggregates, "tokenpipe"]
    assert (result["completed"], result["failed"], result["request_goodput"]) == (1, 1, None)
    assert result["mean_ttft_ms"] == pytest.approx(100.0)
    assert result["latencies"] == pytest.approx([0.2, 0.0])
    assert result["tokenpipe"]["outcomes"] == {"complete": 1, "upstream_status": 1}
    assert result["tokenpipe"]["statuses"] == {"500": 1}


def test_the_detailed_json() -> None:
    records = [record(0, events=[0.1, 0.2]), record(1, events=[0.3], outcome=Outcome.UPSTREAM_RESET, error="cut")]
    result = as_json(settings("--save-detailed"), "m", measured(records, "--save-detailed"))
    assert set(DETAILS) <= set(result)
    assert (result["ttfts"], result["output_lens"], result["errors"]) == (pytest.approx([0.1, 0.3]), [2, 0], ["", "cut"])
    assert result["itls"] == [pytest.approx([0.1]), []]
    assert [each["outcome"] for each in result["tokenpipe"]["requests"]] == ["complete", "upstream_reset"]


def test_no_number_that_json_lacks() -> None:
    words = ("--request-rate", "inf", "--burstiness", "inf")
    one = measured([record(0)], *words)
    one.run.rate = math.inf
    result = as_json(settings(*words), "m", one)
    json.dumps(result, allow_nan=False)
    assert (result["request_rate"], result["burstiness"]) == ("inf", "inf")


def test_queueing_is_reported_where_there_may_be_some() -> None:
    late = [record(0, started=0.5, events=[0.6], arrived=0.2)]
    plain = as_json(settings(), "m", measured(late))
    assert "mean_client_queue_time_ms" not in plain
    held = as_json(settings("--max-concurrency", "1"), "m", measured(late, "--max-concurrency", "1"))
    assert held["mean_client_queue_time_ms"] == pytest.approx(300.0)
    assert held["mean_e2el_including_client_queue_ms"] == pytest.approx(400.0)
    assert held["mean_e2el_ms"] == pytest.approx(100.0)


def test_the_table_is_vllms() -> None:
    words = ("--goodput", "ttft:500", "--max-concurrency", "4", "--metric-percentiles", "99", "--request-rate", "10")
    lines = table(settings(*words), measured([record(0, events=[0.1, 0.2])], *words)).splitlines()
    assert lines[:14] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Failed requests:                         0",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           10.00",
        "Benchmark duration (s):                  1.00",
        "Total input tokens:                      10",
        "Total generated tokens:                  2",
        "Request throughput (req/s):              1.00",
        "Request goodput (req/s):                 1.00",
        "Output token throughput (tok/s):         2.00",
        "Peak output token throughput (tok/s):    2.00",
        "Peak concurrent requests:                1.00",
        "Total token throughput (tok/s):          12.00",
    ]
    assert lines[14:18] == [
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00",
        "Median TTFT (ms):                        100.00",
        "P99 TTFT (ms):                           100.00",
    ]
    headers = [line for line in lines if line.startswith("--")]
    assert headers == [
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
        "---------------Client-side Queueing---------------",
        "--------Queue-inclusive End-to-end Latency--------",
        "----------------Token counts from-----------------",
        "--------------The load tester itself--------------",
    ]


def test_the_table_says_what_failed() -> None:
    gone = record(1, outcome=Outcome.UPSTREAM_STATUS, status=429, error="status 429 Too Many Requests busy\n")
    text = table(settings(), measured([record(0, events=[0.1]), gone]))
    assert "Failures by outcome" in text
    assert "upstream_status:                         1\n  1 x status 429 Too Many Requests busy\n" in text


def test_file_names() -> None:
    run = run_of([record(0)])
    assert str(result_path(settings("--max-concurrency", "8"), "org/m", run)) == (
        "openai-chat-10.0qps-concurrency8-m-20261201-062810.json"
    )
    words = ("--result-dir", "out", "--result-filename", "x.json", "--request-rate", "10,20")
    assert str(result_path(settings(*words), "m", run)) == "out/x-10.0qps.json"
    assert str(result_path(settings(*words, "--append-result"), "m", run)) == "out/x.json"
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9", "--label", "L")
    assert str(result_path(settings(*ramp), "m", run)) == "L-ramp-up-linear-1qps-9qps-m-20261201-062810.json"


def test_appended_results_are_lines(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "new" / "r.json"
    for number in range(3):
        save(path, {"n": number}, append=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"n": 0}, {"n": 1}, {"n": 2}]
    save(path, {"n": 9}, append=False)
    assert json.loads(path.read_text()) == {"n": 9}
