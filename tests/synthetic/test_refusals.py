"""vLLM's refusals, byte for byte as it sent them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.synthetic.server import SyntheticUpstream
from tests.synthetic.conftest import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, StartMock, connect, request

CHAT_BODY = BODIES[CHAT]
VALIDATION = '{"error":{"message":"1 validation error:\\n  '
BAD = '{"error":{"message":"'


def bad(message: str, param: str, value: object) -> str:
    return (
        f'{BAD}{message} (parameter={param}, value={value})","type":"BadRequestError","param":"{param}","code":400}}}}'
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        (CHAT, b'{"model":"tiny", bad', 400,
         VALIDATION + "{'type': 'json_invalid', 'loc': 'body.17', 'msg': 'JSON decode error', 'input': '<dict of 0 "
         "items>', 'ctx': {'error': 'Expecting property name enclosed in double quotes'}}\",\"type\":\"Bad Request\","
         '"param":"body.17","code":400}}'),
        (CHAT, b"", 400,
         VALIDATION + "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}\",\"type\":"
         '"Bad Request","param":"body","code":400}}'),
        (CHAT, b"[1]", 400,
         VALIDATION + "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary or "
         "object to extract fields from', 'input': '<list of 1 items>'}\",\"type\":\"Bad Request\",\"param\":\"body\","
         '"code":400}}'),
        (CHAT, b'{"model":"\xff"}', 400, '{"detail":"There was an error parsing the body"}'),
        (CHAT, {"model": "synthetic"}, 400,
         VALIDATION + "{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 1 "
         "items>'}\",\"type\":\"Bad Request\",\"param\":\"body.messages\",\"code\":400}}"),
        (CHAT, CHAT_BODY | {"kv_transfer_params": "x"}, 400,
         VALIDATION + "{'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid "
         "dictionary', 'input': 'x'}\",\"type\":\"Bad Request\",\"param\":\"body.kv_transfer_params\",\"code\":400}}"),
        (CHAT, CHAT_BODY | {"model": "nope"}, 404,
         BAD + 'The model `nope` does not exist. Valid aliases: synthetic.","type":"NotFoundError","param":"model",'
         '"code":404}}'),
        (MESSAGES, BODIES[MESSAGES] | {"model": "nope"}, 404,
         '{"type":"error","error":{"type":"NotFoundError","message":"The model `nope` does not exist. Valid aliases: '
         'synthetic."}}'),
        (CHAT, CHAT_BODY | {"n": 0}, 400,
         BAD + 'n must be at least 1, got 0.","type":"BadRequestError","param":null,"code":400}}'),
        (CHAT, CHAT_BODY | {"n": 99999}, 400, bad("n must be at most 16384, got 99999.", "n", 99999)),
        (CHAT, CHAT_BODY | {"max_tokens": 0}, 400, bad("max_tokens must be at least 1, got 0.", "max_tokens", 0)),
        (CHAT, CHAT_BODY | {"max_tokens": -1}, 400, bad("max_tokens must be at least 1, got -1.", "max_tokens", -1)),
        (CHAT, CHAT_BODY | {"max_tokens": 9_999_999}, 400,
         bad("max_tokens=9999999 cannot be greater than max_model_len=1048576. Please request fewer output tokens.",
             "max_tokens", 9_999_999)),
        (CHAT, CHAT_BODY | {"temperature": -1}, 400,
         bad("temperature must be non-negative, got -1.0.", "temperature", "-1.0")),
        (CHAT, CHAT_BODY | {"top_p": 2}, 400, bad("top_p must be in (0, 1], got 2.0.", "top_p", "2.0")),
        (COMPLETIONS, {"model": "synthetic"}, 400,
         BAD + 'Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",'
         '"type":"BadRequestError","param":"prompt","code":400}}'),
        (COMPLETIONS, BODIES[COMPLETIONS] | {"stream_options": {"include_usage": True}}, 400,
         BAD + 'Stream options can only be defined when `stream=True`. (parameter=stream_options)",'
         '"type":"BadRequestError","param":"stream_options","code":400}}'),
    ],
)  # fmt: skip
async def test_a_body_is_refused(mock: SyntheticUpstream, path: str, body: Any, status: int, expected: str) -> None:
    client = await connect(mock)
    answer = await client.ask(request("POST", path, body))
    assert (answer.status, answer.body.decode()) == (status, expected)
    assert [name for name, _ in answer.fields] == ["date", "server", "content-length", "content-type", "vary", "x-synthetic"]  # fmt: skip  # noqa: E501
    # and the connection goes on
    assert (await client.ask(request("GET", "/health"))).status == 200
    client.fin()


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (CHAT, {"max_tokens": "x"}),
        (CHAT, {"max_tokens": [1]}),
        (CHAT, {"stream": "perhaps"}),
        (CHAT, {"temperature": "hot"}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"stream_options": 1}),
        (CHAT, {"model": 1}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": [1, "a"]}),
        (RESPONSES, {"max_output_tokens": []}),
        (MESSAGES, {"max_tokens": 1.5}),
    ],
)
async def test_a_wrong_type_is_named(mock: SyntheticUpstream, path: str, wrong: dict[str, Any]) -> None:
    client = await connect(mock)
    answer = await client.ask(request("POST", path, BODIES[path] | wrong))
    assert answer.status == 400
    assert answer.json()["error"]["param"] == f"body.{next(iter(wrong))}"
    client.fin()


async def test_what_stands_for_the_right_type(mock: SyntheticUpstream) -> None:
    """As vLLM's models take it: they are not strict."""
    client = await connect(mock)
    loose = {"max_tokens": "3.0", "temperature": "0.5", "stream": "yes", "stream_options": {"include_usage": 1}}
    answer = await client.ask(request("POST", CHAT, BODIES[CHAT] | loose))
    assert answer.status == 200 and answer.events()[-1] == "[DONE]"
    assert json.loads(answer.events()[-2])["usage"]["completion_tokens"] == 3
    client.fin()


async def test_too_long_a_prompt(start_mock: StartMock) -> None:
    client = await connect(await start_mock(max_model_len=10))
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 20}]}], "stream": True}),
        (COMPLETIONS, {"prompt": ["x", "word " * 20]}),
        (RESPONSES, {"input": [{"role": "user", "content": "word " * 20}]}),
        (MESSAGES, {"system": "word " * 20}),
    ]
    for path, changes in bodies:
        answer = await client.ask(request("POST", path, BODIES[path] | changes))
        assert answer.status == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 10 tokens. However, your prompt contains at")
        assert message.endswith("(parameter=input_tokens, value=11)")
    # within the limit, and cut to it without a word
    answer = await client.ask(
        request("POST", COMPLETIONS, {"prompt": "a b c d e f", "max_tokens": 9, "ignore_eos": True})
    )
    assert answer.json()["usage"]["completion_tokens"] == 4
    client.fin()


@pytest.mark.parametrize("fields", ["", "Content-Type: text/plain\r\n"])
async def test_another_media_type(mock: SyntheticUpstream, fields: str) -> None:
    client = await connect(mock)
    answer = await client.ask(request("POST", CHAT, CHAT_BODY, fields))
    assert answer.status == 400
    assert answer.json()["error"] == {
        "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }
    client.fin()


async def test_methods_and_paths(mock: SyntheticUpstream) -> None:
    client = await connect(mock)
    for method, path, allowed in [("GET", CHAT, "POST"), ("PUT", CHAT, "POST"), ("DELETE", "/health", "GET")]:
        answer = await client.ask(request(method, path))
        assert (answer.status, answer.body) == (405, b'{"detail":"Method Not Allowed"}')
        assert answer.get("allow") == allowed
    for path in ("/nope", "/v1/embeddings", "/v1/models/synthetic", "/nope/"):
        answer = await client.ask(request("GET", path))
        assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}')
    assert (await client.ask(request("HEAD", "/v1/models"))).status == 405
    assert (await client.ask(request("HEAD", "/metrics"))).status == 200
    answer = await client.ask(request("POST", CHAT + "/?a=b", CHAT_BODY))
    assert (answer.status, answer.get("location")) == (307, f"http://mock{CHAT}?a=b")
    client.fin()


async def test_no_model_and_unknown_fields_are_fine(mock: SyntheticUpstream) -> None:
    client = await connect(mock)
    answer = await client.ask(request("POST", CHAT, {"messages": [{"role": "wizard", "content": None}], "zz": 1}))
    assert (answer.status, answer.json()["model"]) == (200, "synthetic")
    client.fin()


async def test_text_that_utf8_cannot_say(mock: SyntheticUpstream) -> None:
    client = await connect(mock)
    for stream in (False, True):
        body = b'{"prompt":"\\ud800 x","echo":true,"max_tokens":2,"stream":%s}' % (b"true" if stream else b"false")
        answer = await client.ask(request("POST", COMPLETIONS, body))
        assert answer.status == 200
        assert answer.complete
        answer.body.decode()
    client.fin()
