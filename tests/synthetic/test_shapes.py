"""Every API against what a real vLLM 0.32 sent: the events, their order, their keys and the keys' order."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.synthetic.server import SyntheticUpstream
from tests.support.messages import Message
from tests.synthetic.conftest import (
    BODIES,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Ask,
    StartMock,
    connect,
    metric,
    request,
)

# As recorded, each kind of event once; what differs from one run to the next is replaced before it is compared.
ID = '{"id":"chatcmpl-a52d561648f33281","object":"chat.completion.chunk","created":1796106458,"model":"synthetic",'
ROLE = (
    ID + '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    '"prompt_token_ids":null,"prompt_text":null}'
)
TOKEN = ID + '"choices":[{"index":0,"delta":{"content":"two"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
FINISH = (
    ID + '"choices":[{"index":0,"delta":{"content":"two"},"logprobs":null,"finish_reason":"length","stop_reason":null,'
    '"token_ids":null}],"system_fingerprint":"vllm-0.32.0-2299a2ed"}'
)
FINISH_BEFORE_USAGE = FINISH.replace(',"system_fingerprint":"vllm-0.32.0-2299a2ed"', "")
USAGE = (
    ID + '"choices":[],"usage":{"prompt_tokens":20,"total_tokens":44,"completion_tokens":24},'
    '"system_fingerprint":"vllm-0.32.0-2299a2ed"}'
)
TEXT = (
    '{"id":"cmpl-94aa2ab016ce1421","object":"text_completion","created":1796106474,"model":"synthetic","choices":['
    '{"index":0,"text":"llo","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    '"token_ids":null}]}'
)
TEXT_FINISH = TEXT.replace('"finish_reason":null', '"finish_reason":"length"').replace(
    "}]}", '}],"system_fingerprint":"vllm-0.32.0-2299a2ed"}'
)
WHOLE_CHAT = (
    '{"id":"chatcmpl-b2261351f7fb70ce","object":"chat.completion","created":1796106472,"model":"synthetic","choices":'
    '[{"index":0,"message":{"role":"assistant","content":"umthe","refusal":null,"annotations":null,"audio":null,'
    '"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,'
    '"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-2299a2ed","usage":'
    '{"prompt_tokens":20,"total_tokens":22,"completion_tokens":2,"prompt_tokens_details":null,'
    '"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,'
    '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
WHOLE_TEXT = (
    '{"id":"cmpl-add87c1945b62895","object":"text_completion","created":1796106482,"model":"synthetic","choices":[{'
    '"index":0,"text":"one","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":'
    '"vllm-0.32.0-2299a2ed","usage":{"prompt_tokens":1,"total_tokens":17,"completion_tokens":16,'
    '"prompt_tokens_details":null,"completion_tokens_details":null},"kv_transfer_params":null,'
    '"ec_transfer_params":null,"metrics":null}'
)
WHOLE_MESSAGE = (
    '{"id":"chatcmpl-b421429955d6d7ee","type":"message","role":"assistant","content":[{"type":"text","text":"heansw"}],'
    '"model":"synthetic","stop_reason":"max_tokens","usage":{"input_tokens":11,"output_tokens":2}}'
)
RESPONSE = (
    '{"id":"resp_989e013382797681","created_at":1796106482,"incomplete_details":{"reason":"max_output_tokens"},'
    '"instructions":null,"metadata":null,"model":"synthetic","object":"response","output":[{"id":"msg_8f8681317f319a20",'
    '"content":[{"annotations":[],"text":"hreequick","type":"output_text","logprobs":null}],"role":"assistant",'
    '"status":"completed","type":"message","phase":null}],"parallel_tool_calls":true,"temperature":1.0,'
    '"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":16,"max_tool_calls":null,'
    '"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"incomplete",'
    '"text":null,"top_logprobs":null,"truncation":"disabled","usage":{"input_tokens":6,"input_tokens_details":{'
    '"cached_tokens":0,"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":16,'
    '"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],'
    '"tool_output_tokens_per_turn":[]},"total_tokens":22},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,'
    '"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}'
)
_VARYING = [
    (r'"(chatcmpl-|cmpl-|resp_|msg_)[^"]*"', r'"\1ID"'),
    (r'"(created|created_at|\w*tokens|sequence_number)":\d+', r'"\1":0'),
    (r'"(text|delta)":"(?:[^"\\]|\\.)*"', r'"\1":"..."'),
    (r'"content":"(?:[^"\\]|\\.)+"', '"content":"..."'),
    (r"vllm-0\.32\.0-\w+", "vllm-0.32.0-HASH"),
]


def plain(data: str) -> str:
    for pattern, by in _VARYING:
        data = re.sub(pattern, by, data)
    return data


def same(got: list[str], *want: str) -> None:
    assert [plain(data) for data in got] == [plain(data) for data in want]


def named(message: Message) -> list[str]:
    return re.findall(r"^event: (.*)$", message.body.decode(), re.M)


def spoken(message: Message) -> str:
    return "".join(json.loads(data).get("delta", "") for data in message.events() if "output_text.delta" in data)


async def test_the_head_of_a_stream_is_vllms(ask: Ask) -> None:
    answer = await ask(CHAT, stream=True)
    assert answer.start == "HTTP/1.1 200 OK"
    assert [name for name, _ in answer.fields] == ["date", "server", "content-type", "vary", "x-synthetic", "transfer-encoding"]  # fmt: skip  # noqa: E501
    assert answer.without("date") == [
        ("server", "uvicorn"),
        ("content-type", "text/event-stream; charset=utf-8"),
        ("vary", "Origin"),
        ("x-synthetic", "1"),
        ("transfer-encoding", "chunked"),
    ]


@pytest.mark.parametrize("path", BODIES)
async def test_one_http_chunk_is_one_event(ask: Ask, path: str) -> None:
    answer = await ask(path, stream=True)
    assert answer.complete
    for _, chunk in answer.chunks:
        assert re.fullmatch(rb"(event: [\w.]+\n)?data: [^\r\n]+\n\n", chunk)


async def test_chat_streamed(ask: Ask) -> None:
    same((await ask(CHAT, stream=True)).events(), ROLE, TOKEN, TOKEN, TOKEN, FINISH, "[DONE]")


async def test_chat_of_one_token_has_a_role_and_a_finish(ask: Ask) -> None:
    same((await ask(CHAT, stream=True, max_tokens=1)).events(), ROLE, FINISH, "[DONE]")


async def test_chat_with_usage(ask: Ask) -> None:
    events = (await ask(CHAT, stream=True, stream_options={"include_usage": True})).events()
    same(events, ROLE, TOKEN, TOKEN, TOKEN, FINISH_BEFORE_USAGE, USAGE, "[DONE]")
    assert json.loads(events[-2])["usage"] == {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4}


async def test_continuous_usage_counts_up(ask: Ask) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await ask(CHAT, stream=True, stream_options=options)).events()
    assert [json.loads(data)["usage"]["completion_tokens"] for data in events[:-1]] == [0, 1, 2, 3, 4, 4]
    assert list(json.loads(events[0])) == ["id", "object", "created", "model", "choices", "usage", "prompt_token_ids", "prompt_text"]  # fmt: skip  # noqa: E501


async def test_continuous_usage_alone_does_nothing(ask: Ask) -> None:
    events = (await ask(CHAT, stream=True, stream_options={"continuous_usage_stats": True})).events()
    same(events, ROLE, TOKEN, TOKEN, TOKEN, FINISH, "[DONE]")


async def test_completions_streamed(ask: Ask) -> None:
    same((await ask(COMPLETIONS, stream=True)).events(), TEXT, TEXT, TEXT, TEXT_FINISH, "[DONE]")


async def test_a_list_of_prompts_shares_a_stream(ask: Ask) -> None:
    options = {"include_usage": True}
    events = (
        await ask(COMPLETIONS, stream=True, prompt=["a", "b"], n=2, max_tokens=2, stream_options=options)
    ).events()
    chunks = [json.loads(data) for data in events[:-1]]
    assert [choice["index"] for chunk in chunks for choice in chunk["choices"]] == [0, 1, 2, 3] * 2
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "total_tokens": 10, "completion_tokens": 8}


async def test_echo_puts_the_prompt_before_the_first_token(ask: Ask) -> None:
    streamed, whole = [await ask(COMPLETIONS, stream=stream, echo=True, seed=1) for stream in (True, False)]
    first = json.loads(streamed.events()[0])["choices"][0]["text"]
    assert first.startswith("hello there") and len(first) > len("hello there")
    assert whole.json()["choices"][0]["text"].startswith(first)


async def test_prompts_of_tokens_are_counted(ask: Ask) -> None:
    answer = (await ask(COMPLETIONS, prompt=[[1, 2, 3], [4, 5]], echo=True)).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["prompt_tokens"] == 5


async def test_several_choices_each_have_a_role_chunk(ask: Ask) -> None:
    events = (await ask(CHAT, stream=True, n=2, max_tokens=1)).events()
    assert [json.loads(data)["choices"][0]["index"] for data in events[:-1]] == [0, 1, 0, 1]
    assert all("role" in data for data in events[:2])


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_two_apis_know_neither_n_nor_stream_options(ask: Ask, path: str) -> None:
    answer = (await ask(path, n=3, stream_options={"include_usage": True})).json()
    assert answer["usage"]["output_tokens"] == 4


async def test_responses_streamed(ask: Ask) -> None:
    answer = await ask(RESPONSES, stream=True)
    delta = ["response.output_text.delta"] * 4
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert named(answer) == [f"response.{name}" for name in opening] + delta + [f"response.{name}" for name in closing]
    events = [json.loads(data) for data in answer.events()]
    assert [event["type"] for event in events] == named(answer)
    assert [event["sequence_number"] for event in events] == list(range(12))
    assert "[DONE]" not in answer.events()
    assert events[-1]["response"]["status"] == "incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == spoken(answer)


async def test_events_of_responses_have_vllms_keys(ask: Ask) -> None:
    events = (await ask(RESPONSES, stream=True, max_output_tokens=1)).events()
    item = '"item_id":"msg_1"'
    message = (
        '{"id":"msg_1","content":[{"annotations":[],"text":"x","type":"output_text","logprobs":null}],'
        '"role":"assistant","status":"completed","type":"message","phase":null}'
    )
    opened = RESPONSE.replace(',"incomplete_details":{"reason":"max_output_tokens"}', ',"incomplete_details":null')
    opened = opened.replace('"status":"incomplete"', '"status":"in_progress"')
    opened = re.sub(r'"output":\[.*?"parallel', '"output":[],"parallel', opened)
    opened = re.sub(r'"usage":.*"user"', '"usage":null,"user"', opened).replace(":16", ":1")
    same(
        events,
        f'{{"response":{opened},"sequence_number":0,"type":"response.created"}}',
        f'{{"response":{opened},"sequence_number":1,"type":"response.in_progress"}}',
        '{"item":{"id":"msg_1","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null},'
        '"output_index":0,"sequence_number":2,"type":"response.output_item.added"}',
        f'{{"content_index":0,{item},"output_index":0,"part":{{"annotations":[],"text":"","type":"output_text",'
        '"logprobs":[]},"sequence_number":3,"type":"response.content_part.added"}',
        f'{{"content_index":0,"delta":"x",{item},"logprobs":[],"output_index":0,"sequence_number":4,'
        '"type":"response.output_text.delta"}',
        f'{{"content_index":0,{item},"logprobs":[],"output_index":0,"sequence_number":5,"text":"x",'
        '"type":"response.output_text.done"}',
        f'{{"content_index":0,{item},"output_index":0,"part":{{"annotations":[],"text":"x","type":"output_text",'
        '"logprobs":null},"sequence_number":6,"type":"response.content_part.done"}',
        f'{{"item":{message},"output_index":0,"sequence_number":7,"type":"response.output_item.done"}}',
        f'{{"response":{RESPONSE},"sequence_number":8,"type":"response.completed"}}',
    )


async def test_messages_streamed(ask: Ask) -> None:
    answer = await ask(MESSAGES, stream=True, max_tokens=1)
    same(
        answer.events(),
        '{"type":"message_start","message":{"id":"chatcmpl-9bf61fd7793b9591","type":"message","role":"assistant",'
        '"content":[],"model":"synthetic","stop_reason":null,"stop_sequence":null,'
        '"usage":{"input_tokens":11,"output_tokens":0}}}',
        '{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}',
        '{"type":"content_block_delta","delta":{"type":"text_delta","text":"ane"},"index":0}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},'
        '"usage":{"input_tokens":11,"output_tokens":16}}',
        '{"type":"message_stop"}',
    )
    assert named(answer) == [json.loads(data)["type"] for data in answer.events()]


@pytest.mark.parametrize(
    ("path", "recorded"),
    [(CHAT, WHOLE_CHAT), (COMPLETIONS, WHOLE_TEXT), (RESPONSES, RESPONSE), (MESSAGES, WHOLE_MESSAGE)],
)
async def test_unstreamed(ask: Ask, path: str, recorded: str) -> None:
    answer = await ask(path)
    same([answer.body.decode()], recorded.replace('"max_output_tokens":16', '"max_output_tokens":4'))
    assert answer.without("date", "content-length") == [
        ("server", "uvicorn"),
        ("content-type", "application/json"),
        ("vary", "Origin"),
        ("x-synthetic", "1"),
    ]


async def test_an_answer_that_ends_by_itself_ends_with_a_token_without_text(start_mock: StartMock) -> None:
    client = await connect(await start_mock(tokens=3))
    streamed = await client.ask(request("POST", CHAT, {**BODIES[CHAT], "max_tokens": 50, "stream": True}))
    last = json.loads(streamed.events()[-2])["choices"][0]
    assert (last["finish_reason"], last["delta"]) == ("stop", {"content": ""})
    whole = (await client.ask(request("POST", MESSAGES, {**BODIES[MESSAGES], "max_tokens": 50}))).json()
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("end_turn", 3)
    forced = {**BODIES[CHAT], "max_completion_tokens": 9, "max_tokens": 1, "ignore_eos": True}
    answer = (await client.ask(request("POST", CHAT, forced))).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (9, "length")
    client.fin()


async def test_a_single_end_of_text_leaves_no_empty_event(start_mock: StartMock) -> None:
    client = await connect(await start_mock(tokens=1))
    message = await client.ask(request("POST", MESSAGES, {**BODIES[MESSAGES], "max_tokens": 50, "stream": True}))
    assert named(message) == ["message_start", "message_delta", "message_stop"]
    response = await client.ask(
        request("POST", RESPONSES, {**BODIES[RESPONSES], "max_output_tokens": 9, "stream": True})
    )
    assert named(response) == ["response.created", "response.in_progress", "response.completed"]
    client.fin()


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-"), (MESSAGES, "chatcmpl-")])
async def test_the_clients_request_id_is_the_id(mock: SyntheticUpstream, path: str, prefix: str) -> None:
    client = await connect(mock)
    fields = 'Content-Type: application/json\r\nX-Request-Id: my \\"id\r\n'
    answer = await client.ask(request("POST", path, BODIES[path], fields))
    assert answer.json()["id"] == prefix + 'my \\"id'
    client.fin()


async def test_what_else_vllm_answers(mock: SyntheticUpstream) -> None:
    client = await connect(mock)

    async def get(path: str) -> Message:
        return await client.ask(request("GET", path))

    (model,) = (await get("/v1/models")).json()["data"]
    assert list(model) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("synthetic", "vllm", 1_048_576)
    for method, path in [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]:
        answer = await client.ask(request(method, path))
        assert (answer.status, answer.body) == (200, b"")
        assert [name for name, _ in answer.fields] == ["date", "server", "content-length", "vary", "x-synthetic"]
    assert (await get("/version")).json() == {"version": "0.32.0"}
    assert (await get("/load")).json() == {"server_load": 0}
    counted = {"model": "synthetic", "messages": [{"role": "user", "content": "hello"}], "system": "be brief"}
    answer = await client.ask(request("POST", "/v1/messages/count_tokens", counted))
    assert answer.json() == {"input_tokens": 5, "context_management": {"original_input_tokens": 5}}
    answer = await client.ask(request("POST", "/invocations", BODIES[CHAT]))
    assert answer.json()["object"] == "chat.completion"
    client.fin()


async def test_tokens_can_be_put_together_again(mock: SyntheticUpstream) -> None:
    client, text = await connect(mock), "Grüße an 東京,  zwei Leerzeichen\n🙂"
    tokens: dict[str, Any] = (
        await client.ask(request("POST", "/tokenize", {"prompt": text, "return_token_strs": True}))
    ).json()
    assert list(tokens) == ["count", "max_model_len", "tokens", "token_strs"]
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    answer = await client.ask(request("POST", "/detokenize", {"tokens": tokens["tokens"]}))
    assert answer.json() == {"prompt": text}
    answer = await client.ask(request("POST", "/detokenize", {"tokens": [999_999]}))
    assert answer.json() == {"prompt": "\ufffd"}
    client.fin()


async def test_metrics_bear_vllms_names(mock: SyntheticUpstream, ask: Ask) -> None:
    await ask(CHAT, stream=True)
    await ask(CHAT, max_tokens=50)  # more than the four that this one says
    client = await connect(mock)
    answer = await client.ask(request("GET", "/metrics"))
    client.fin()
    assert answer.get("content-type") == "text/plain; version=1.0.0; charset=utf-8"
    text = answer.body.decode()
    labels = '{engine="0",model_name="synthetic"}'
    for line in [
        f"vllm:num_requests_running{labels} 0.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
        f"vllm:prompt_tokens_total{labels} 8.0",
        f"vllm:generation_tokens_total{labels} 8.0",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="synthetic"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="synthetic"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="synthetic"} 0.0',
        f"vllm:time_to_first_token_seconds_count{labels} 2.0",
        f"vllm:inter_token_latency_seconds_count{labels} 6.0",
        f"vllm:e2e_request_latency_seconds_count{labels} 2.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="2560.0",model_name="synthetic"} 2.0',
        "tokenpipe_mock_aborted_requests_total 0.0",
    ]:
        assert line in text.splitlines()
    assert await metric(mock, "tokenpipe_mock_aborted_requests_total") == 0
