"""What is counted: each request once, under its true outcome, in a bounded set of series, whatever clients do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.telemetry.histogram import B_TPOT, B_TTFT, Histogram
from tests.support import script as s
from tests.support.gateway import Gateway, Samples
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
END = b"".join(map(s.chunk, s.FINISHED)) + s.LAST
STOP = s.event({"id": "c", "object": "chat.completion.chunk", "model": "m",
                "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})  # fmt: skip
ROLE = s.event({"id": "c", "object": "chat.completion.chunk", "model": "m",
                "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})  # fmt: skip
USAGE = s.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}})


def chat(request_id: str, **members: Any) -> bytes:
    return s.post({**s.CHAT, **members}, fields=[("X-Request-Id", request_id)])


async def left(wire: HttpWire, request: Message) -> None:
    await wire.send(s.SSE_HEAD + s.chunk(s.delta("a")))
    await wire.wait_closed(10)


ENDINGS: dict[str, tuple[s.Script, str]] = {
    "complete": (s.stream(s.delta("a"), *s.FINISHED), "complete"),
    "json": (s.reply(200, {"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 1}}), "complete"),
    "empty": (s.stream(ROLE, STOP, s.DONE), "empty"),
    "status": (s.reply(429, b"{}"), "upstream_status"),
    "status 500": (s.reply(500, b"{}"), "upstream_status"),
    "error event": (s.stream(s.delta("a"), s.event({"error": {"message": "x", "code": 500}}), s.DONE), "stream_error"),
    "truncated": (s.stream(s.delta("a")), "upstream_truncated"),
    "reset": (s.raw(s.SSE_HEAD, s.chunk(s.delta("a")), then="reset"), "upstream_reset"),
    "vanish": (s.vanish, "upstream_reset"),
    "malformed": (s.raw(b"HTTP/1.1 200 OK\r\nx\r\n\r\n", then="fin"), "upstream_reset"),
    "silent": (s.Held(), "timeout_first_byte"),
    "idle": (s.Held(s.SSE_HEAD, s.chunk(s.delta("a"))), "timeout_idle"),
    "refused": (s.reply(), "refused"),
    "gone": (left, "client_gone"),
    "gone waiting": (s.Held(), "client_gone"),
}


@pytest.mark.seconds(60)
async def test_a_random_mix_of_all_endings(start_gateway: Start, upstream: RawUpstream) -> None:
    """As many counted as were sent, each under its outcome, in log and metrics alike; nothing in flight behind them."""
    config = {"timeouts": {"first_byte": 0.4, "idle": 0.4}, "breaker": {"failures": 1000}, "retry": {"attempts": 1}}
    gateway = await start_gateway(config=config, backends=[upstream.url])
    chance, names = random.Random(11), list(ENDINGS)
    plan = names * 4 + [chance.choice(names) for _ in range(60)]
    chance.shuffle(plan)

    async def script(wire: HttpWire, request: Message) -> None:
        name = (request.get("x-request-id") or "").partition(".")[2].replace("-", " ")
        await ENDINGS[name][0](wire, request)

    async def one(number: int, name: str) -> None:
        client = await gateway.connect()
        request = chat(f"{number}.{name.replace(' ', '-')}", stream=name != "json")
        if name == "refused":
            request = request.replace(b"/v1/chat/completions", b"/v9/no")
        await client.send(request)
        if name.startswith("gone"):
            if name == "gone":
                await client.receive_until(b"data:")
            else:
                await asyncio.sleep(0.05)
            client.reset()
            return
        await client.read_response()
        client.fin()

    upstream.script = script
    for at in range(0, len(plan), 20):
        await asyncio.gather(*(one(at + n, name) for n, name in enumerate(plan[at : at + 20])))
    await gateway.idle()
    samples = await gateway.metrics()
    expected = Counter(ENDINGS[name][1] for name in plan)
    counted = {outcome: samples.value("tokenpipe_requests_total", outcome=outcome) for outcome in expected}
    assert counted == expected
    assert samples.value("tokenpipe_requests_total") == len(plan)
    assert samples.value("tokenpipe_request_duration_seconds_count") == len(plan)
    assert samples.value("tokenpipe_requests_in_flight") == 0
    assert samples.value("tokenpipe_queue_depth") == 0
    assert samples.value("tokenpipe_write_buffer_bytes") == 0
    assert samples.value("tokenpipe_client_aborts_total") == expected["client_gone"]
    assert samples.value("tokenpipe_abort_seconds_count") == expected["client_gone"]
    log = await gateway.logged(len(plan))
    assert Counter(e["outcome"] for e in log) == expected
    assert len({e["request_id"] for e in log}) == len(log) == len(plan)
    code = {e["code"] for e in log if e["outcome"] == "refused"}
    assert code == {"unknown_path"}
    assert samples.value("tokenpipe_requests_total", code="unknown_path") == expected["refused"]
    assert samples.value("tokenpipe_requests_total", outcome="upstream_status", code="429") == plan.count("status")


async def test_scrapes_in_between_count_nothing_twice(start_gateway: Start, upstream: RawUpstream) -> None:
    """A stream that is scraped while it runs counts as one that is not."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    upstream.script = s.stream(*[s.delta("a")] * 30, STOP, USAGE, s.DONE, gap=0.01)
    asking = asyncio.create_task(gateway.ask())
    while not asking.done():
        await gateway.metrics()
    answer = await asking
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_time_to_first_token_seconds_count") == 1
    assert samples.value("tokenpipe_inter_token_latency_seconds_count") == 29
    assert samples.value("tokenpipe_relayed_bytes_total", direction="response") in (0, len(answer.body))
    total = sum(v for n, _, v in samples if n == "tokenpipe_relayed_bytes_total")
    assert total == len(answer.body) + len(upstream.requests[0].body)
    assert samples.value("tokenpipe_output_tokens_total", source="usage") == 10
    assert samples.value("tokenpipe_prompt_tokens_total", source="usage") == 3


async def test_times_against_a_paced_upstream(start_gateway: Start, upstream: RawUpstream) -> None:
    """TTFT, ITL, TPOT and duration are what the backend's clock says they are."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    loop_times: list[float] = []

    async def script(wire: HttpWire, request: Message) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(0.1)
        await wire.send(s.SSE_HEAD + s.chunk(ROLE))
        await asyncio.sleep(0.2)
        sent = []
        for _ in range(10):
            await wire.send(s.chunk(s.delta("a")))
            sent.append(clock())
            await asyncio.sleep(0.05)
        await wire.send(s.chunk(STOP) + s.chunk(USAGE) + s.chunk(s.DONE) + s.LAST)
        loop_times.extend((sent[0] - began, sent[-1] - sent[0], clock() - began))

    upstream.script = script
    for _ in range(2):
        assert (await gateway.ask()).complete
    ttft, spread, whole = (loop_times[i] + loop_times[i + 3] for i in range(3))
    samples = await gateway.metrics()
    for name, expected, count in (
        ("time_to_first_token", ttft, 2), ("inter_token_latency", spread, 18), ("time_per_output_token", spread / 9, 2),
        ("request_duration", whole, 2), ("time_to_first_byte", 0.2, 2),
    ):  # fmt: skip
        assert samples.value(f"tokenpipe_{name}_seconds_count") == count, name
        total = samples.value(f"tokenpipe_{name}_seconds_sum")
        assert total == pytest.approx(expected, abs=0.03), name
    assert samples.value("tokenpipe_time_per_output_token_seconds_count", source="usage") == 2
    entry = gateway.access_log(outcome="complete")[0]
    assert entry["ttft_s"] == pytest.approx(loop_times[0], abs=0.02)
    assert entry["tpot_s"] == pytest.approx(loop_times[1] / 9, abs=0.01)
    assert (entry["prompt_tokens"], entry["output_tokens"]) == (3, 10)


def within_a_bucket(samples: Samples, name: str, edges: Sequence[float], seen: Sequence[float], **labels: str) -> None:
    """What the gateway counted, and what a client saw, of the same things: sorted, no pair is more than a bucket apart."""
    client = Histogram(tuple(edges))
    for seconds in seen:
        client.observe(seconds)
    gateway = [samples.value(f"{name}_bucket", le=f"{edge}", **labels) for edge in (*edges, "+Inf")]
    assert gateway[-1] == len(seen), name
    for bucket, (ours, theirs) in enumerate(zip(gateway, client.cumulative(), strict=True)):
        if bucket:
            assert gateway[bucket - 1] <= theirs, (name, bucket, sorted(seen), gateway)
            assert client.cumulative()[bucket - 1] <= ours, (name, bucket, sorted(seen), gateway)


async def test_the_histograms_agree_with_what_clients_saw(start_gateway: Start, upstream: RawUpstream) -> None:
    """TTFT, inter-token latency and TPOT, of streams of many paces side by side, one event or several in a read."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    clock = asyncio.get_running_loop().time

    async def script(wire: HttpWire, request: Message) -> None:
        chance = random.Random(request.get("x-request-id"))
        await wire.send(s.SSE_HEAD + s.chunk(ROLE))
        for _ in range(5):
            await asyncio.sleep(chance.choice([0.035, 0.12, 0.25, 0.35]))
            await wire.send(s.chunk(s.delta("a")))
        await wire.send(s.chunk(STOP) + s.chunk(USAGE.replace(b":10", b":5")) + s.chunk(s.DONE) + s.LAST)

    ttfts: list[float] = []
    gaps: list[float] = []
    tpots: list[float] = []

    async def one(number: int) -> None:
        client = await gateway.connect()
        began, data, arrivals = clock(), b"", []
        await client.send(chat(f"agree-{number}"))
        while b"[DONE]" not in data:
            data += await client.receive()
            arrivals += [clock()] * (data.count(b'"content":"a"') - len(arrivals))
        client.fin()
        ttfts.append(arrivals[0] - began)
        gaps.extend(later - sooner for sooner, later in itertools.pairwise(arrivals))
        tpots.append((arrivals[-1] - arrivals[0]) / 4)

    upstream.script = script
    await asyncio.gather(*(one(number) for number in range(12)))
    await gateway.idle()
    samples = await gateway.metrics()
    within_a_bucket(samples, "tokenpipe_time_to_first_token_seconds", B_TTFT, ttfts)
    within_a_bucket(samples, "tokenpipe_inter_token_latency_seconds", B_TPOT, gaps)
    within_a_bucket(samples, "tokenpipe_time_per_output_token_seconds", B_TPOT, tpots, source="usage")


async def test_where_the_time_went(start_gateway: Start, upstream: RawUpstream) -> None:
    """Body, queue, head and first event, each as long as the client or the backend made it; what is left is next to nothing."""
    gateway = await start_gateway(config={"limits": {"in_flight": 1}}, backends=[upstream.url])

    async def script(wire: HttpWire, request: Message) -> None:
        await asyncio.sleep(0.2)
        await wire.send(s.SSE_HEAD + s.chunk(ROLE))
        await asyncio.sleep(0.3)
        await wire.send(b"".join(map(s.chunk, (s.delta("a"), *s.FINISHED))) + s.LAST)

    upstream.script = script
    first = asyncio.create_task(gateway.ask(chat("first")))
    await upstream.wait_requests()
    second = await gateway.connect()
    request = chat("second")
    await second.send(request[:-10])
    await asyncio.sleep(0.1)
    await second.send(request[-10:])  # and is kept waiting for 0.4 s by the first one
    assert (await second.read_response()).complete
    assert (await first).complete
    second.fin()
    samples = await gateway.metrics()
    for name, seconds in {
        "body": 0.1, "queue": 0.4, "pick": 0.0, "connect": 0.0, "response_head": 0.4, "first_event": 0.6,
        "upstream_time_to_first_token": 1.0,
    }.items():  # fmt: skip
        assert samples.value(f"tokenpipe_{name}_seconds_count") == 2, name
        took = samples.value(f"tokenpipe_{name}_seconds_sum")
        assert seconds - 0.03 < took < seconds + 0.2, name  # of a loaded machine, which may be late
    for stage in ("request", "first_event"):
        assert samples.value("tokenpipe_overhead_seconds_count", stage=stage) == 2
        assert samples.value("tokenpipe_overhead_seconds_sum", stage=stage) < 0.2


async def test_a_trace_is_named_where_it_can_be_looked_at(start_gateway: Start, upstream: RawUpstream) -> None:
    gateway = await start_gateway(config={}, backends=[upstream.url])
    upstream.script = s.stream(s.delta("a"), *s.FINISHED)
    kept, other = "0af7651916cd43dd8448eb211c80319c", "1" * 32
    for trace, flags in ((kept, "01"), (other, "00")):
        field = ("traceparent", f"00-{trace}-b7ad6b7169203331-{flags}")
        await gateway.ask(s.post(fields=[field, ("X-Request-Id", trace)]))
        (line,) = await gateway.logged(request_id=trace)
        assert line["trace_id"] == trace
    assert upstream.requests[0].get("traceparent") == f"00-{kept}-b7ad6b7169203331-01"
    answer = await gateway.admin(s.get("/metrics", [("Accept", "application/openmetrics-text; version=1.0.0")]))
    families = parse_openmetrics(answer.body.decode())  # type: ignore[no-untyped-call]
    exemplars = {
        (family.name, sample.exemplar.labels["trace_id"])
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    }
    exemplars.discard(("tokenpipe_time_per_output_token_seconds", kept))  # there is one if the events came in several reads
    assert exemplars == {
        ("tokenpipe_time_to_first_token_seconds", kept), ("tokenpipe_request_duration_seconds", kept),
    }  # fmt: skip
    assert kept.encode() not in (await gateway.admin(s.get("/metrics"))).body


MADE_UP = ["../../etc", 'a"b', "a\\b", "a\nb", "\u2028", "é" * 50, "x" * 5000, "m ", "M", "\x00", "{}", 'le="0"',
           "\ud800"]  # fmt: skip


async def test_series_are_bounded(start_gateway: Start, upstream: RawUpstream) -> None:
    """Made-up models, paths, ids and methods by the hundred add no series and stand in no label."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    async with asyncio.timeout(10):
        while not (await gateway.admin(s.get("/-/backends"))).json()[0]["models"]:
            await asyncio.sleep(0.02)

    async def several(start: int) -> None:
        for number in range(start, start + 60):
            name = MADE_UP[number % len(MADE_UP)] + str(number)
            await gateway.ask(s.post({**s.CHAT, "model": name}))
            await gateway.ask(s.get(f"/v1/{number}?model={number}", [("X-Request-Id", f"id{number}")]))
            await gateway.ask(s.get(f"/no/{number}"))
            await gateway.ask(s.get("/v1/models", method=f"M{number}"))
            upstream.script = s.reply(200 + number % 3 * 100 + number % 7, b"{}")

    await gateway.ask()
    await several(0)
    before = await gateway.metrics()
    await several(60)
    after = await gateway.metrics()
    assert len(after) <= len(before) + 40  # some statuses may be new
    models = {labels["model"] for _, labels, _ in after if "model" in labels}
    assert models <= {"m", "other", "none", ""}
    assert len(after) < 1500
    assert after.value("tokenpipe_requests_total") == 1 + 480
    text = (await gateway.admin(s.get("/metrics"))).body
    assert b"id7" not in text
    assert b"etc" not in text
    log = await gateway.logged(481)
    assert len(log) == 481
    assert len(gateway.stderr().splitlines()) < 500


@pytest.mark.parametrize(
    "accept",
    [
        "", "text/plain", "*/*", "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
    ],
)  # fmt: skip
async def test_both_formats_are_valid(gateway: Gateway, upstream: RawUpstream, accept: str) -> None:
    """Read by prometheus_client's own parsers; every name is the gateway's or the process's, with its help and type."""
    upstream.script = s.stream(s.delta("a"), s.delta("b"), USAGE, *s.FINISHED)
    await gateway.ask()
    fields = [("Accept", accept)] if accept else []
    answer = await gateway.admin(s.get("/metrics", fields))
    text, kind = answer.body.decode(), answer.get("content-type") or ""
    openmetrics = kind.startswith("application/openmetrics-text")
    assert openmetrics == ("openmetrics" in accept)
    families = list((parse_openmetrics if openmetrics else parse_text)(text))
    assert text.endswith("# EOF\n") == openmetrics
    names = {family.name for family in families}
    assert {"tokenpipe_time_to_first_token_seconds", "tokenpipe_requests_in_flight", "tokenpipe_build_info"} <= {
        name.removesuffix("_info") if openmetrics and name != "tokenpipe_build_info" else name for name in names
    } | {"tokenpipe_build_info"}
    for family in families:
        assert re.match(r"(tokenpipe|process|python)_", family.name), family.name
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        if family.type == "histogram":
            _check_histogram(Samples((x.name, x.labels, x.value) for x in family.samples), family.name)
    lines = [line.split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(set(lines)), "a series stands twice"


def _check_histogram(samples: Samples, name: str) -> None:
    """Buckets grow, and the last of them is the count."""
    series: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for sample, labels, value in samples:
        if sample == f"{name}_bucket":
            key = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
            series.setdefault(key, []).append(value)
    for key, values in series.items():
        assert values == sorted(values)
        assert values[-1] == samples.value(f"{name}_count", **dict(key))


async def test_every_promised_name_is_there(gateway: Gateway, upstream: RawUpstream) -> None:
    """The names that dashboards rely on, after ordinary traffic."""
    upstream.script = s.stream(s.delta("a"), s.delta("b"), USAGE, *s.FINISHED, gap=0.02)  # in reads of their own
    for _ in range(2):
        await gateway.ask()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            while not await gateway.metric("tokenpipe_event_loop_lag_seconds_count"):
                await asyncio.sleep(0.05)
    samples = await gateway.metrics()
    have = {name for name, _, _ in samples}
    promised = [
        "requests_total", "time_to_first_token_seconds_count", "time_per_output_token_seconds_count",
        "inter_token_latency_seconds_count", "request_duration_seconds_count", "time_to_first_byte_seconds_count",
        "queue_seconds_count", "connect_seconds_count", "prompt_tokens_total", "output_tokens_total",
        "abort_seconds_count", "write_buffer_bytes", "queue_depth", "relayed_bytes_total", "backend_up",
        "backend_state", "upstream_connections", "upstream_connections_reused_total",
        "event_loop_lag_seconds_count", "config_reloads_total", "config_last_reload_success_timestamp_seconds",
        "build_info",
    ]  # fmt: skip
    missing = [name for name in promised if f"tokenpipe_{name}" not in have]
    assert not missing
    assert {"process_cpu_seconds_total", "process_open_fds", "process_resident_memory_bytes"} <= have
    assert samples.value("tokenpipe_upstream_connections_reused_total") >= 1
    assert samples.value("tokenpipe_upstream_connections") == 1


async def test_pauses(start_gateway: Start, upstream: RawUpstream) -> None:
    """A client that holds back is counted, with the time, while it lasts and when it is over."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    upstream.script = s.stream(*[s.delta("y" * 8000)] * 200, *s.FINISHED)
    client = await gateway.connect(receive_buffer=4096)
    await client.send(s.post())
    await asyncio.sleep(0.5)
    assert await gateway.metric("tokenpipe_write_buffer_bytes") > 0
    assert (await client.read_response(timeout=20)).complete
    client.fin()
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_backpressure_pauses_total") >= 1
    assert samples.value("tokenpipe_backpressure_seconds_total") == pytest.approx(0.5, abs=0.4)
    assert samples.value("tokenpipe_write_buffer_bytes") == 0


async def test_what_the_log_says(start_gateway: Start, upstream: RawUpstream) -> None:
    """Times in UTC, a duration that covers the body, no query, prompt, output or key; one line whatever is sent."""
    gateway = await start_gateway(config={}, backends=[upstream.url], environment={"TZ": "Asia/Kolkata"})
    upstream.script = s.stream(s.delta("OUTPUT"), *s.FINISHED, gap=0.1)
    body = {**s.CHAT, "messages": [{"role": "user", "content": "PROMPT"}]}
    fields = [("Authorization", "Bearer sk-secret"), ("X-Request-Id", "logged")]
    await gateway.ask(s.post(body, "/v1/chat/completions?api_key=sk-query", fields))
    (entry,) = await gateway.logged(request_id="logged")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
    assert entry["duration_s"] >= 0.3
    assert entry["ttfb_s"] < 0.2
    assert entry["path"] == "/v1/chat/completions"
    for secret in ("sk-secret", "sk-query", "PROMPT", "OUTPUT"):
        assert secret not in gateway.stderr()
    lines = len(gateway.stderr().splitlines())
    await gateway.ask(s.post({**s.CHAT, "model": 'a\n{"outcome": "forged"}\r\n\x1b[31m'}))
    await gateway.logged(2)
    assert len(gateway.stderr().splitlines()) == lines + 1
    assert "\x1b" not in gateway.stderr()


@pytest.mark.parametrize("how", ["reset", "fin"])
async def test_what_a_client_that_left_had_got_is_counted_to_the_last_event(
    start_gateway: Start, upstream: RawUpstream, how: str
) -> None:
    """Events that differ only in their text are shown to the meter some dozens at a time: none may be left over."""
    events = [s.delta(f"w{number:03}") for number in range(40)]

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send(s.SSE_HEAD)
        for event in events:
            await wire.send(s.chunk(event))
            await asyncio.sleep(0.002)
        await wire.wait_closed(10)

    upstream.script = script
    gateway = await start_gateway(config={}, backends=[upstream.url])
    client = await gateway.connect()
    await client.send(chat("left"))
    await client.receive_until(events[-1])
    getattr(client, how)()
    await gateway.logged(request_id="left")
    samples = await gateway.metrics()
    assert samples.value("tokenpipe_output_tokens_total", source="events") == len(events)
    assert samples.value("tokenpipe_inter_token_latency_seconds_count") == len(events) - 1
    (line,) = gateway.access_log(request_id="left")
    assert line["outcome"] == "client_gone"
    assert (line["bytes_out"], line["output_tokens"]) == (sum(map(len, events)), len(events))
