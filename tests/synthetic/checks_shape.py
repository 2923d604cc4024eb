"""Rows of deploy/mock.md: time and length, what an event holds, how it is written, how bytes reach the wire."""

from __future__ import annotations

import json
import re
import time
from itertools import accumulate, pairwise

import pytest

from tests.support.messages import Message
from tests.synthetic.conftest import CHAT, COMPLETIONS, MESSAGES, RESPONSES, metric
from tests.synthetic.trial import RECORDINGS, Trial, chunks, contents, finishes, sees

# time and length ------------------------------------------------------------------------------------------------------


@sees("ttft=0.06")
async def first_token(t: Trial) -> None:
    _, at = await t.timed()
    assert at[0] >= 0.058  # role chunk and first token together
    assert (await t.planned())[1] == pytest.approx(0.06, abs=0.005)
    client = await t.send("ttft=30")
    assert (await client.read_response_head()).status == 200  # long before


@sees("ttft=per_token:0.02:0.01")
async def first_token_by_prompt(t: Trial) -> None:
    await t.ask(messages=[{"role": "user", "content": "abcd efgh ijk lmn"}])
    prompt = (await t.ask("usage=final", messages=[{"role": "user", "content": "abcd efgh ijk lmn"}])).events()[-2]
    counted = json.loads(prompt)["usage"]["prompt_tokens"]
    assert (await t.planned(1))[1] == pytest.approx(0.02 + 0.01 * counted, abs=0.005)


@sees("ttft=list:0.01:0.06")
async def first_token_listed(t: Trial) -> None:
    for _ in range(3):
        await t.ask()
    planned = [(await t.planned(2 - number))[1] for number in range(3)]
    assert planned == pytest.approx([0.01, 0.06, 0.01], abs=0.005)


@sees("itl=0.02")
async def between_tokens(t: Trial) -> None:
    _, at = await t.timed()
    assert at[6] >= 0.098
    planned = (await t.planned())[2:8]
    assert [b - a for a, b in pairwise(planned)] == pytest.approx([0.02] * 5, abs=1e-6)


@sees("itl=list:0.01:0.05")
async def between_tokens_listed(t: Trial) -> None:
    await t.ask()
    planned = (await t.planned())[2:8]
    gaps = [b - a for a, b in pairwise(planned)]
    assert gaps == pytest.approx([0.01, 0.05, 0.01, 0.05, 0.01], abs=1e-6)


@sees("tokens=7")
async def length(t: Trial) -> None:
    answer = await t.ask()
    assert (len(contents(answer)), contents(answer)[-1], finishes(answer)) == (7, "", ["stop"])
    answer = await t.ask(max_tokens=3)
    assert (len(contents(answer)), finishes(answer)) == (3, ["length"])


@sees("tokens=uniform:3:90")
async def length_drawn(t: Trial) -> None:
    lengths = []
    for _ in range(2):
        mock = await t.start(seed=3)
        lengths.append([len(contents(await t.ask(mock=mock))) for _ in range(4)])
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1
    assert all(3 <= number <= 90 for number in lengths[0])


@sees("head=0.05;ttft=0.1")
async def late_head(t: Trial) -> None:
    client, start = await t.send(), time.monotonic()
    await client.read_response_head()
    assert time.monotonic() - start >= 0.045
    await client.receive_until(b"[DONE]")
    planned = await t.planned()
    assert planned[:2] == pytest.approx([0.05, 0.1], abs=0.005)


@sees("role=early;ttft=0.05")
async def early_role(t: Trial) -> None:
    for path, name in ((CHAT, '"role":"assistant"'), (MESSAGES, "message_start")):
        answer, at = await t.timed(path=path)
        assert name in answer.events()[0]
        assert at[1] >= 0.048
        planned = await t.planned()
        assert planned[1] < 0.01 and planned[2] == pytest.approx(0.05, abs=0.005)


@sees("speed=10;ttft=0.5")
async def fast(t: Trial) -> None:
    await t.ask(t.row + ";itl=0.1")
    planned = await t.planned()
    assert planned[1] == pytest.approx(0.05, abs=0.005)
    assert planned[3] - planned[2] == pytest.approx(0.01, abs=1e-6)


# what an event holds --------------------------------------------------------------------------------------------------


@sees("tokens_per_event=3")
async def bundles(t: Trial) -> None:
    answer = await t.ask(t.row + ";usage=continuous", seed=1)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)] == [0, 3, 6, 6]
    assert answer.text() == (await t.ask("", seed=1)).text()


@sees("tokens_per_event=accepted:3:0.6")
async def speculative(t: Trial) -> None:
    answer = await t.ask(t.row + ";usage=continuous;tokens=100")
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)[:-1]]
    steps = [b - a for a, b in pairwise(counts)]
    assert set(steps) == {1, 2, 3, 4}
    drafts = await metric(t.mock, "vllm:spec_decode_num_drafts_total")
    assert await metric(t.mock, "vllm:spec_decode_num_accepted_tokens_total") == 100 - drafts
    assert drafts == len(steps)
    assert await metric(t.mock, "vllm:spec_decode_num_draft_tokens_total") == 3 * drafts


@sees("stream_interval=3")
async def interval(t: Trial) -> None:
    answer = await t.ask(t.row + ";usage=continuous;tokens=9;itl=0.001")
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)] == [0, 1, 4, 7, 9, 9]
    planned = await t.planned()
    assert planned[3] - planned[2] == pytest.approx(0.003, abs=1e-6)
    answer = await t.ask("usage=continuous", stream_interval=5)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)] == [0, 1, 6, 6]


@sees("hidden=1")
async def hidden(t: Trial) -> None:
    answer = await t.ask(t.row + ";usage=final")
    _, finish, usage = chunks(answer)
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["usage"]["completion_tokens"] == 6


@sees("text=multibyte")
async def multibyte(t: Trial) -> None:
    answer = await t.ask(t.row + ";tokens=200")
    pieces = contents(answer)
    assert len(pieces) == 200
    waiting = 0
    for piece in pieces[:-1]:
        waiting += 1
        if piece:
            assert (len(piece), len(piece.encode())) == (1, waiting)
            waiting = 0
    assert {2, 3, 4} <= {len(piece.encode()) for piece in pieces}


@sees("reasoning=2")
async def reasoning(t: Trial) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(await t.ask())[1:]]
    assert [next(iter(delta), None) for delta in deltas] == ["reasoning", "reasoning", "content", "content", "content", None]
    whole = (await t.ask(stream=None)).json()
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert message["reasoning"] and message["content"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    blocks = chunks(await t.ask(path=MESSAGES))
    kinds = [block["content_block"]["type"] for block in blocks if block["type"] == "content_block_start"]
    assert kinds == ["thinking", "text"]
    thought = [block["delta"] for block in blocks if block["type"] == "content_block_delta" and block["index"] == 0]
    assert [delta["type"] for delta in thought] == ["thinking_delta"] * 2 + ["signature_delta"]
    items = [event for event in chunks(await t.ask(path=RESPONSES)) if event["type"] == "response.output_item.added"]
    assert [(item["output_index"], item["item"]["type"]) for item in items] == [(0, "reasoning"), (1, "message")]
    assert len((await t.ask(path=COMPLETIONS)).text()) > 0  # which knows no reasoning


@sees("reasoning=2;reasoning_field=reasoning_content")
async def older_reasoning(t: Trial) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(await t.ask())]
    assert [name for delta in deltas for name in delta].count("reasoning_content") == 2


@sees("tools=2")
async def tools(t: Trial) -> None:
    answer = await t.ask(t.row + ";tokens=20")
    calls: dict[int, str] = {}
    for chunk in chunks(answer):
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            calls[call["index"]] = calls.get(call["index"], "") + call["function"].get("arguments", "")
            assert ("id" in call) == ("name" in call["function"])
    assert [json.loads(arguments) for arguments in calls.values()] == [{"city": "東京", "days": 3}] * 2
    assert finishes(answer) == ["tool_calls"]
    assert chunks(answer)[-1]["choices"][0]["delta"] == {}
    whole = (await t.ask(t.row + ";tokens=20", stream=None)).json()["choices"][0]
    assert [json.loads(call["function"]["arguments"])["days"] for call in whole["message"]["tool_calls"]] == [3, 3]
    assert whole["finish_reason"] == "tool_calls"
    message = (await t.ask(path=MESSAGES, stream=None)).json()
    assert [block["type"] for block in message["content"]][-2:] == ["tool_use", "tool_use"]
    assert message["content"][-1]["input"] == {"city": "東京", "days": 3}
    assert message["stop_reason"] == "tool_use"
    streamed = chunks(await t.ask(path=MESSAGES))
    pieces = [event["delta"]["partial_json"] for event in streamed if "partial_json" in event.get("delta", {})]
    assert "".join(pieces) == '{"city": "東京", "days": 3}' * 2
    done = [event for event in chunks(await t.ask(path=RESPONSES)) if event["type"].endswith("arguments.done")]
    assert [json.loads(event["arguments"])["city"] for event in done] == ["東京", "東京"]


@sees("cached=3")
async def cached(t: Trial) -> None:
    answer = await t.ask(t.row + ";usage=final;ttft=per_token:0:0.01")
    usage = chunks(answer)[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert await metric(t.mock, "vllm:prefix_cache_hits_total") == 3
    assert await metric(t.mock, "vllm:prefix_cache_queries_total") == usage["prompt_tokens"]
    assert (await t.planned())[1] == pytest.approx(0.01 * (usage["prompt_tokens"] - 3), abs=0.005)


def counted(answer: Message) -> list[int | None]:
    """Completion tokens by each event's usage, -1 where it is null, None where there is none."""
    found: list[int | None] = []
    for chunk in chunks(answer):
        usage = chunk.get("usage", False)
        found.append(None if usage is False else -1 if usage is None else usage["completion_tokens"])
    return found


USAGES = {
    "usage=final": [None] * 7 + [6],
    "usage=none": [None] * 7,
    "usage=continuous": [0, 1, 2, 3, 4, 5, 6, 6],
    "usage=null": [-1] * 7 + [6],
    "usage=finish": [None] * 6 + [6],
    "usage=wrong": [None] * 7 + [12],
    "usage=twice": [None] * 7 + [6, 6],
    "usage=after_done": [None] * 7 + [6],
}


@sees(*USAGES)
async def usage(t: Trial) -> None:
    answer = await t.ask(stream_options={"include_usage": True} if t.row == "usage=none" else None)
    assert counted(answer) == USAGES[t.row]
    assert (answer.events()[-1] == "[DONE]") is (t.row != "usage=after_done")
    plain = counted(await t.ask(path=COMPLETIONS))
    assert plain[-2:] == USAGES[t.row][-2:]


# how events are written -----------------------------------------------------------------------------------------------


@sees("eol=crlf", "eol=cr")
async def line_ends(t: Trial) -> None:
    end = {"eol=crlf": b"\r\n", "eol=cr": b"\r"}[t.row]
    answer = await t.ask(path=RESPONSES)
    assert all(re.fullmatch(rb"event: \S+" + end + rb"data: [^\r\n]+" + end + end, data) for _, data in answer.chunks)
    assert (await t.ask()).events()[-1] == "[DONE]"


@sees("space=off")
async def no_blank(t: Trial) -> None:
    answer = await t.ask()
    assert all(data.startswith(b"data:{") for _, data in answer.chunks[:-1])
    assert answer.chunks[-1][1] == b"data:[DONE]\n\n"


@sees("bom=on")
async def byte_order_mark(t: Trial) -> None:
    answer = await t.ask()
    assert answer.body.startswith(b"\xef\xbb\xbfdata: {")
    assert answer.body.count(b"\xef\xbb\xbf") == 1


@sees("event_id=on")
async def event_ids(t: Trial) -> None:
    answer = await t.ask()
    assert re.findall(rb"^id: (\d+)$", answer.body, re.M) == [b"%d" % number for number in range(8)]
    assert b"\nretry: 1000\n" in answer.body


@sees("multiline=on")
async def several_lines(t: Trial) -> None:
    answer = await t.ask()
    assert all(data.count(b"\ndata: ") == 1 for _, data in answer.chunks[:-1])
    assert len(contents(answer)) == 6  # put together they are JSON


@sees("escape=ascii")
async def escaped(t: Trial) -> None:
    answer, raw = await t.ask(t.row + ";text=multibyte;tokens=80", seed=2), await t.ask("text=multibyte;tokens=80", seed=2)
    assert answer.body.isascii() and not raw.body.isascii()
    assert answer.text() == raw.text()


@sees("final_blank=off")
async def no_final_blank(t: Trial) -> None:
    for ask in (t.row, t.row + ";framing=length"):
        answer = await t.ask(ask)
        assert answer.complete
        assert answer.body.endswith(b"}\n\ndata: [DONE]\n")


@sees("comment=0.03;ttft=0.1")
async def comments(t: Trial) -> None:
    answer, at = await t.timed()
    silent = [data for _, data in answer.chunks[:3]]
    assert silent == [b": keep-alive\n\n"] * 3
    assert at[0] >= 0.028
    assert len(contents(answer)) == 6


# how bytes reach the wire ---------------------------------------------------------------------------------------------


async def reads(t: Trial, ask: str, **options: object) -> tuple[Message, list[bytes]]:
    """The answer, and what each read of it took: a write that is made after another was read is a read of its own."""
    client = await t.send(ask, **options)
    answer = await client.read_response()
    return answer, [data for _, data in client.reads]


@sees("framing=length")
async def by_length(t: Trial) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        answer = await t.ask(t.row + ";text=multibyte;tokens_per_event=accepted:2:0.5;reasoning=3", path=path)
        assert (answer.framing, answer.complete) == ("length", True)
        assert answer.get("transfer-encoding") is None
        assert "[DONE]" in answer.events() or path in (RESPONSES, MESSAGES)
    short = await t.send(t.row + ";fault=error_event@token:2")
    answer = await short.read_response()
    assert (answer.complete, short.ended) == (False, "fin")
    first = await t.send(t.row + ";itl=5")
    assert b'"content":"' in await first.receive_until(b"finish_reason")  # it streams all the same


@sees("framing=close")
async def by_the_end(t: Trial) -> None:
    client = await t.send()
    answer = await client.read_response()
    assert (answer.framing, answer.complete, client.ended) == ("close", True, "fin")
    assert answer.events()[-1] == "[DONE]"


@sees("chunk=7")
async def small_chunks(t: Trial) -> None:
    answer = await t.ask()
    assert answer.complete and len(contents(answer)) == 6
    assert max(len(data) for _, data in answer.chunks) == 7


@sees("coalesce=3")
async def gathered(t: Trial) -> None:
    answer, found = await reads(t, t.row + ";itl=0.005")
    assert answer.complete and len(answer.chunks) == 8
    taken = list(accumulate(data.count(b"data: ") for data in found))
    assert set(taken) <= {0, 3, 6, 8} and len(set(taken)) >= 3


@sees("coalesce=all")
async def in_one(t: Trial) -> None:
    answer, found = await reads(t, t.row)
    assert answer.complete and len(answer.chunks) == 8
    assert len(found) == 1


@sees("split=40")
async def split(t: Trial) -> None:
    answer, found = await reads(t, t.row + ";gap=0.003")
    assert answer.complete and len(contents(answer)) == 6
    assert max(map(len, found)) <= 40


@sees("split=utf8;text=multibyte")
async def split_characters(t: Trial) -> None:
    answer, found = await reads(t, t.row + ";tokens=40;gap=0.003")
    assert answer.complete
    inside = [data for data in found if data[0] & 0xC0 == 0x80]
    assert len(inside) >= 10


@sees("split=crlf")
async def split_line_ends(t: Trial) -> None:
    answer, found = await reads(t, t.row + ";gap=0.003")
    assert answer.complete
    whole = b"".join(found)
    assert sum(data[:1] == b"\n" for data in found) >= whole.count(b"\r\n")


@sees("split=400;gap=0.02")
async def split_slowly(t: Trial) -> None:
    start = time.monotonic()
    answer, found = await reads(t, t.row, stream=None)
    assert answer.complete and len(found) >= 2
    assert time.monotonic() - start >= 0.018


@sees("replay=default/chat_stream;speed=20")
async def replay(t: Trial) -> None:
    if not RECORDINGS.is_dir():
        pytest.skip("no recordings here")
    await t.start(replay=str(RECORDINGS))
    recorded = (RECORDINGS / "default" / "chat_stream.resp").read_bytes()
    facts = json.loads((RECORDINGS / "default" / "chat_stream.json").read_text())
    client = await t.client()
    for _ in range(2):  # on one connection: the recorded answer was whole
        answer = await client.ask(t.bytes())
        assert answer.complete
    assert bytes(client.received) == recorded * 2
    planned = await t.planned()
    assert planned == pytest.approx([moment / 20_000 for moment, _ in facts["recvs_ms_bytes"]], abs=0.005)
    cut = await t.send("replay=fail/api_kill9_stream;speed=1e6")
    answer = await cut.read_response()
    assert (answer.complete, cut.ended) == (False, "fin")
    assert "there is no recording" in (await t.ask("replay=default/nothing")).json()["error"]["message"]
    assert (await t.ask("replay=../default/chat_stream")).status == 400
    assert "takes no faults" in (await t.ask(f"{t.row};fault=reset")).json()["error"]["message"]
    assert (await t.ask("fault=none;replay=default/chat_stream;speed=1e6")).status == 200
