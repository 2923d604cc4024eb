"""The gateway in front of a real vLLM: nothing is changed on the way, and whoever leaves frees its place at once.

Opt-in (`make test-vllm`). VLLM_URL names a server that nobody else uses meanwhile, with the model `tiny`, 16 sequences
at once and a length of 2048: `../shared/vllm/serve.sh`. It wants cores to spare: on two busy ones vLLM itself now and then
answers nothing, /health included, for seconds, and then the limits here are missed without the gateway too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.support import script as s
from tests.support.client import RawClient, connected
from tests.support.gateway import Gateway
from tests.support.messages import Message

URL = os.environ.get("VLLM_URL", "").rstrip("/")
SOON = 2.0  # seconds from the client's end to the engine's; some 0.1 as a rule
SLOTS = 16
SLOW = 60.0  # seconds that an answer may take: the first ones after a start stall
LONG = 1900  # tokens: four seconds or more

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.seconds(120),
    pytest.mark.skipif(not URL, reason="VLLM_URL is not set: `../shared/vllm/serve.sh 18000`, VLLM_URL=http://127.0.0.1:18000"),
]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "hello 東京"}]
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 24},
    COMPLETIONS: {"prompt": "hello 東京", "max_tokens": 24},
    RESPONSES: {"input": "hello 東京", "max_output_tokens": 24},
    MESSAGES: {"messages": TURN, "max_tokens": 24},
}
LIMITS = {path: next(key for key in body if key.endswith("tokens")) for path, body in PROMPTS.items()}
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
API = pytest.mark.parametrize("path", list(PROMPTS), ids=lambda path: path.removeprefix("/v1/").replace("/", "-"))


def ask(path: str, body: dict[str, Any]) -> bytes:
    """The same request id both ways, for vLLM makes it a part of its own ids."""
    return s.post({"model": "tiny", "temperature": 0, **PROMPTS[path], **body}, path, [("X-Request-Id", "same-id")])


def long(path: str, stream: bool) -> bytes:
    """Seconds of work for the engine."""
    return ask(path, {"stream": stream, "ignore_eos": True, LIMITS[path]: LONG})


class Engine:
    """vLLM, asked without the gateway."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url, self.host, self.port = url, parts.hostname or "127.0.0.1", parts.port or 80

    async def connect(self) -> RawClient:
        return await RawClient.connect(self.host, self.port)

    async def ask(self, request: bytes) -> Message:
        async with connected(self.host, self.port) as client:
            return await client.ask(request, timeout=SLOW)

    async def metrics(self, *names: str) -> list[float]:
        """vLLM's own, each summed over its labels. Nothing else is parsed: the machine is busy enough."""
        text = (await self.ask(s.get("/metrics"))).body.decode()
        found = [re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M) for name in names]
        assert all(found), f"not all of {names} are there"
        return [sum(map(float, values)) for values in found]

    async def wait(self, *, running: int, waiting: int = 0, timeout: float = 30.0) -> float:
        """Until that many requests run and wait; returns when that was seen."""
        async with asyncio.timeout(timeout):
            while await self.metrics("num_requests_running", "num_requests_waiting") != [running, waiting]:
                await asyncio.sleep(0.02)
        return time.monotonic()


@pytest.fixture
async def engine() -> Engine:
    engine = Engine(URL)
    assert (await engine.ask(s.get("/health"))).status == 200
    await engine.wait(running=0)
    return engine


@pytest.fixture
async def gateway(start_gateway: Callable[..., Awaitable[Gateway]], engine: Engine) -> AsyncIterator[Gateway]:
    gateway = await start_gateway(backends=[engine.url])
    yield gateway
    await gateway.idle()


# --- byte for byte


CHANGING = {"id", "item_id", "created", "created_at", "completed_at", "sequence_number", "delta", "content", "text"}


def normal(value: Any, key: str = "") -> Any:
    """What must be the same both ways: all but ids, times and the texts, which vLLM may cut otherwise. Order counts."""
    if isinstance(value, dict):
        return [(name, normal(member, name)) for name, member in value.items()]
    if isinstance(value, list):
        return [normal(member) for member in value]
    return type(value).__name__ if key in CHANGING else value


def shape(message: Message) -> list[Any]:
    """Of its events, or of its one object. Several tokens in one event look like one token."""
    events = message.events() if "event-stream" in (message.get("content-type") or "") else [message.body.decode()]
    found: list[Any] = []
    for data in events:
        item = data if data == "[DONE]" else normal(json.loads(data))
        if not found or item != found[-1]:
            found.append(item)
    return found


def texts(message: Message) -> str:
    """All text members in their order, deltas run together."""
    return "".join(re.findall(r'"(?:content|text|delta)": ?"((?:[^"\\]|\\.)*)"', message.body.decode()))


async def both(engine: Engine, gateway: Gateway, request: bytes) -> tuple[Message, Message]:
    """Asked once before, so that both find the same in the prefix cache."""
    await engine.ask(request)
    return await engine.ask(request), await gateway.ask(request, timeout=SLOW)


def check_same_head(direct: Message, through: Message) -> None:
    assert through.start == direct.start
    own = ("date", "x-request-id", "content-length", "transfer-encoding", "via")
    assert through.without(*own) == direct.without(*own)
    assert through.framing == direct.framing
    assert direct.complete and through.complete
    names = sorted(name.lower() for name, _ in through.fields)
    assert names == sorted([*(name.lower() for name, _ in direct.fields), "x-request-id"])


@STREAMED
@API
async def test_an_answer_is_the_same_as_without_the_gateway(engine: Engine, gateway: Gateway, path: str, stream: bool) -> None:
    direct, through = await both(engine, gateway, ask(path, {"stream": stream}))
    assert direct.status == 200
    check_same_head(direct, through)
    assert shape(through) == shape(direct)
    assert texts(through) == texts(direct) != ""
    assert through.get("x-request-id") == "same-id"


ERRORS: dict[str, tuple[str, dict[str, Any], int]] = {
    "unknown model": (CHAT, {"model": "nope"}, 404),
    "unknown model, streamed": (COMPLETIONS, {"model": "nope", "stream": True}, 404),
    "unknown model of messages": (MESSAGES, {"model": "nope"}, 404),
    "bad max_tokens": (CHAT, {"max_tokens": -1}, 400),
    "bad max_tokens, streamed": (CHAT, {"max_tokens": -1, "stream": True}, 400),
    "max_tokens of a wrong type": (COMPLETIONS, {"max_tokens": "many"}, 400),
    "prompt too long": (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}], "stream": True}, 400),
    "no such response": (RESPONSES, {"previous_response_id": "resp_nope"}, 404),
    "bad temperature": (RESPONSES, {"temperature": -3}, 400),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_an_error_is_the_same_as_without_the_gateway(engine: Engine, gateway: Gateway, case: str) -> None:
    path, body, status = ERRORS[case]
    direct, through = await both(engine, gateway, ask(path, body))
    assert direct.status == status, direct.body
    check_same_head(direct, through)
    assert through.body == direct.body
    assert through.get("content-length") == direct.get("content-length")
    await gateway.idle()
    assert await gateway.metric("tokenpipe_requests_total", outcome="upstream_status") == 1


async def test_an_error_within_a_stream_passes_and_is_no_success(engine: Engine, gateway: Gateway) -> None:
    request = ask(CHAT, {"stream": True, "structured_outputs": {"regex": "(("}})
    direct, through = await both(engine, gateway, request)
    check_same_head(direct, through)
    assert through.status == 200 and through.body == direct.body and b'"error"' in through.body
    await gateway.idle()
    assert await gateway.metric("tokenpipe_requests_total", outcome="stream_error") == 1


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
async def test_what_else_it_serves(engine: Engine, gateway: Gateway, path: str) -> None:
    direct, through = await both(engine, gateway, s.get(path))
    if through.get("x-gateway-error"):
        pytest.skip(f"{path} is not served by the gateway")
    check_same_head(direct, through)
    assert shape(through)[0][0] == shape(direct)[0][0]


# --- the clients


class Answer(NamedTuple):
    texts: list[str]
    reasons: list[str | None]
    tokens: int  # of output, as the engine reports them


@pytest.fixture
async def openai_clients(engine: Engine, gateway: Gateway) -> AsyncIterator[list[Any]]:
    """One for the engine, one for the gateway."""
    openai = pytest.importorskip("openai", reason="needs `pip install openai`: the extra `vllm`")
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0, timeout=SLOW)
        for url in (engine.url, gateway.url)
    ]
    yield clients
    for client in clients:
        await client.close()


@pytest.fixture
async def anthropic_clients(engine: Engine, gateway: Gateway) -> AsyncIterator[list[Any]]:
    anthropic = pytest.importorskip("anthropic", reason="needs `pip install anthropic`: the extra `vllm`")
    clients = [
        anthropic.AsyncAnthropic(base_url=url, auth_token="sk-test", max_retries=0, timeout=SLOW)
        for url in (engine.url, gateway.url)
    ]
    yield clients
    for client in clients:
        await client.close()


async def answer_of_choices(create: Any, *, stream: bool, n: int = 1, **options: Any) -> Answer:
    """Chat and completions: choices, and a usage that a stream has to ask for."""
    found, reasons, usage = [""] * n, [None] * n, None
    if stream:
        options["stream_options"] = {"include_usage": True}
    answer = await create(model="tiny", stream=stream, n=n, **options)
    async for part in answer if stream else _once(answer):
        for choice in part.choices:
            holder = getattr(choice, "delta", None) or getattr(choice, "message", None)
            found[choice.index] += (holder.content if holder else choice.text) or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = part.usage or usage
    assert usage is not None
    return Answer(found, reasons, usage.completion_tokens)


async def _once(value: Any) -> AsyncIterator[Any]:
    yield value


async def answer_of_responses(client: Any, *, stream: bool) -> Answer:
    response = await client.responses.create(model="tiny", temperature=0, stream=stream, **PROMPTS[RESPONSES])
    if stream:
        spelt, last = "", None
        async for event in response:
            spelt += event.delta if event.type == "response.output_text.delta" else ""
            last = event
        assert last is not None and last.type in ("response.completed", "response.incomplete")
        response = last.response
        assert spelt == response.output_text
    return Answer([response.output_text], [response.status], response.usage.output_tokens)


async def answer_of_messages(client: Any, *, stream: bool) -> Answer:
    options = {"model": "tiny", "extra_body": {"temperature": 0}, **PROMPTS[MESSAGES]}
    if stream:
        async with client.messages.stream(**options) as events:
            spelt = "".join([text async for text in events.text_stream])
            message = await events.get_final_message()
        assert spelt == message.content[0].text
    else:
        message = await client.messages.create(**options)
    return Answer([message.content[0].text], [message.stop_reason], message.usage.output_tokens)


async def check_counted(gateway: Gateway, *answers: Answer) -> None:
    """All complete, and as many tokens counted as were reported."""
    await gateway.idle()
    found = await gateway.metrics()
    assert found.value("tokenpipe_requests_total") == len(answers)
    assert found.value("tokenpipe_requests_total", outcome="complete", code="200", model="tiny") == len(answers)
    assert found.value("tokenpipe_output_tokens_total", source="usage") == sum(a.tokens for a in answers)
    assert found.value("tokenpipe_output_tokens_total") == sum(a.tokens for a in answers)


def check_equal(direct: Answer, through: Answer) -> None:
    assert through == direct
    assert all(direct.texts) and all(direct.reasons) and direct.tokens > 0


@STREAMED
@pytest.mark.parametrize("n", [1, 2])
async def test_openai_chat(gateway: Gateway, openai_clients: list[Any], stream: bool, n: int) -> None:
    # vLLM refuses n=2 at temperature 0
    sampling = {"temperature": 0} if n == 1 else {"temperature": 1, "seed": 7}
    direct, through = [
        await answer_of_choices(c.chat.completions.create, stream=stream, n=n, **sampling, **PROMPTS[CHAT])
        for c in openai_clients
    ]
    check_equal(direct, through)
    await check_counted(gateway, through)


@STREAMED
@pytest.mark.parametrize("n", [1, 2])
async def test_openai_completions(gateway: Gateway, openai_clients: list[Any], stream: bool, n: int) -> None:
    sampling = {"temperature": 0} if n == 1 else {"temperature": 1, "seed": 7}
    direct, through = [
        await answer_of_choices(c.completions.create, stream=stream, n=n, **sampling, **PROMPTS[COMPLETIONS])
        for c in openai_clients
    ]
    check_equal(direct, through)
    await check_counted(gateway, through)


@STREAMED
async def test_openai_responses(gateway: Gateway, openai_clients: list[Any], stream: bool) -> None:
    direct, through = [await answer_of_responses(c, stream=stream) for c in openai_clients]
    check_equal(direct, through)
    await check_counted(gateway, through)


@STREAMED
async def test_anthropic_messages(gateway: Gateway, anthropic_clients: list[Any], stream: bool) -> None:
    direct, through = [await answer_of_messages(c, stream=stream) for c in anthropic_clients]
    check_equal(direct, through)
    await check_counted(gateway, through)


async def test_clients_raise_the_same_errors(gateway: Gateway, openai_clients: list[Any], anthropic_clients: list[Any]) -> None:
    import anthropic
    import openai

    async def raised(client: Any, kind: type[Exception], **options: Any) -> tuple[int, Any]:
        create = client.messages.create if hasattr(client, "messages") else client.chat.completions.create
        with pytest.raises(kind) as caught:
            await create(**{"model": "tiny", **PROMPTS[CHAT], **options})
        return caught.value.status_code, caught.value.body  # type: ignore[attr-defined]

    for clients, module in ((openai_clients, openai), (anthropic_clients, anthropic)):
        for kind, options in ((module.NotFoundError, {"model": "nope"}), (module.BadRequestError, {"max_tokens": -1})):
            direct, through = [await raised(client, kind, **options) for client in clients]
            assert through == direct


async def test_a_mixed_run_is_counted_whole(gateway: Gateway, openai_clients: list[Any], anthropic_clients: list[Any]) -> None:
    """All at once, so that they share the engine: every token that it reports is counted, and once."""
    openai, anthropic = openai_clients[1], anthropic_clients[1]
    runs: list[Awaitable[Answer]] = []
    for number in range(12):
        stream, n = number % 2 == 0, 1 + number % 3
        sampling = {"temperature": 1, "seed": number}
        runs += [
            answer_of_choices(openai.chat.completions.create, stream=stream, n=n, **sampling, **PROMPTS[CHAT]),
            answer_of_choices(openai.completions.create, stream=stream, n=n, **sampling, **PROMPTS[COMPLETIONS]),
            answer_of_responses(openai, stream=stream),
            answer_of_messages(anthropic, stream=stream),
        ]
    await check_counted(gateway, *await asyncio.gather(*runs))


# --- leaving


class Counters(NamedTuple):
    """The engine's counters, of tokens made and of requests that ended by themselves."""

    tokens: float
    finished: float

    @classmethod
    async def of(cls, engine: Engine) -> Counters:
        return cls(*await engine.metrics("generation_tokens_total", "request_success_total"))


async def check_freed(engine: Engine, before: Counters, since: float, most: int, what: str) -> None:
    """Nothing runs soon, no token is made any more, and it was no ordinary end, which vLLM would count."""
    took = await engine.wait(running=0, timeout=30) - since
    await asyncio.sleep(0.3)
    after = await Counters.of(engine)
    tokens, finished = after.tokens - before.tokens, after.finished - before.finished
    print(f"abort: {what}: {1000 * took:.0f} ms, {tokens:.0f} tokens in all, {finished:.0f} ended by themselves")
    assert finished == 0
    assert tokens < most
    assert took < SOON
    await asyncio.sleep(0.5)
    assert await Counters.of(engine) == after


async def check_logged(gateway: Gateway, count: int = 1) -> None:
    await gateway.idle()
    found = await gateway.metrics()
    assert found.value("tokenpipe_requests_total", outcome="client_gone") == count
    assert found.value("tokenpipe_requests_total") == count
    assert found.value("tokenpipe_abort_seconds_count") == count
    print(f"  of which in the gateway, at a mean: {1000 * found.value('tokenpipe_abort_seconds_sum') / count:.1f} ms")


@pytest.mark.parametrize("how", ["fin", "reset", "half_close"])
@API
async def test_leaving_mid_stream(engine: Engine, gateway: Gateway, path: str, how: str) -> None:
    before = await Counters.of(engine)
    client = await gateway.connect()
    await client.send(long(path, True))
    async with asyncio.timeout(SLOW):
        while client.received.count(b"data:") < 5:
            assert await client.more(SLOW)
    since = time.monotonic()
    getattr(client, how)()
    await check_freed(engine, before, since, LONG, f"{path} mid-stream, {how}")
    client.reset()
    await check_logged(gateway)


@API
async def test_leaving_an_answer_that_is_no_stream(engine: Engine, gateway: Gateway, path: str) -> None:
    before = await Counters.of(engine)
    client = await gateway.connect()
    await client.send(long(path, False))
    await asyncio.sleep(0.4)  # rather than to ask the engine, which is slow to answer when it is busy
    since = time.monotonic()
    client.fin()
    await check_freed(engine, before, since, LONG, f"{path} not streamed")
    assert (await Counters.of(engine)).tokens > before.tokens
    await check_logged(gateway)


@STREAMED
async def test_leaving_before_the_first_token(engine: Engine, gateway: Gateway, stream: bool) -> None:
    """With all of the engine's places taken, a request waits in its queue, and no token comes."""
    others = [await engine.connect() for _ in range(SLOTS)]
    client = await gateway.connect()
    try:
        for other in others:
            await other.send(long(CHAT, True))
        await engine.wait(running=SLOTS)
        await client.send(long(CHAT, stream))
        await engine.wait(running=SLOTS, waiting=1)
        since = time.monotonic()
        client.fin()
        took = await engine.wait(running=SLOTS, waiting=0) - since
        print(f"abort: before the first token, {'' if stream else 'not '}streamed: {1000 * took:.0f} ms")
        assert took < SOON
        assert b"data:" not in client.received
    finally:
        client.reset()
        for other in others:
            other.reset()
    await engine.wait(running=0)
    await check_logged(gateway)


async def test_leaving_at_once(engine: Engine, gateway: Gateway) -> None:
    """Between the request and its first event, at whatever moment that is."""
    before = await Counters.of(engine)
    for step in range(20):
        client = await gateway.connect()
        await client.send(long(CHAT, step % 2 == 0))
        await asyncio.sleep(0.002 * (step // 2))
        client.reset()
    since = time.monotonic()
    await check_freed(engine, before, since, 20 * LONG, "20 that left within 20 ms")
    await gateway.idle()
    found = await gateway.metrics()
    assert found.value("tokenpipe_requests_total") == found.value("tokenpipe_requests_total", outcome="client_gone")


async def test_sixteen_streams_dropped_together(engine: Engine, gateway: Gateway) -> None:
    before = await Counters.of(engine)
    clients = [await gateway.connect() for _ in range(SLOTS)]
    for client in clients:
        await client.send(long(CHAT, True))
    for client in clients:
        await client.receive_until(b"data:", SLOW)
    since = time.monotonic()
    for client in clients:
        client.reset()
    await check_freed(engine, before, since, SLOTS * LONG, f"{SLOTS} streams together")
    await check_logged(gateway, SLOTS)


# --- what no client may do


@STREAMED
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_client_cannot_name_a_transfer(engine: Engine, gateway: Gateway, path: str, stream: bool) -> None:
    """On an engine with a connector this would be its end; on none it must come so far."""
    before = await Counters.of(engine)
    answer = await gateway.ask(ask(path, {"stream": stream, "kv_transfer_params": {"do_remote_prefill": True}}))
    assert answer.status == 400 and answer.get("x-gateway-error")
    assert "kv_transfer_params" in answer.json()["error"]["message"]
    assert (await engine.ask(s.get("/health"))).status == 200
    assert await Counters.of(engine) == before
    assert (await gateway.ask(ask(path, {"stream": stream}), timeout=SLOW)).status == 200
