"""Rows of deploy/mock.md: the ways to ask, and what is told in return."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.cli import run
from gateway.synthetic import server
from tests.support.client import RawClient
from tests.support.messages import Message
from tests.synthetic.conftest import CHAT, COMPLETIONS, metric, request, standing_still
from tests.synthetic.trial import Trial, chunks, contents, finishes, sees


@sees("x-synth: tokens=3;itl=0")
async def by_header(t: Trial) -> None:
    assert len(contents(await t.ask("tokens=3;itl=0", synth={"tokens": 4}, model="synthetic?tokens=5"))) == 3
    refused = await t.ask("tokens=3;itll=0")
    assert refused.status == 400
    assert "x-synth: itll: unknown knob; the nearest is itl." in refused.json()["error"]["message"]
    for ask, said in {
        "fault=rest": "fault: 'rest': unknown fault 'rest'; the nearest is reset",
        "tokens": "'tokens' is not KNOB=VALUE",
        "eol=crl": "eol: found 'crl'; expected lf or crlf or cr",
        "max_num_seqs=1": "max_num_seqs: is of the whole server",
        "hidden=2": "hidden: found '2'; expected a chance from 0 to 1",
    }.items():
        assert said in (await t.ask(ask)).json()["error"]["message"]


@sees('{"synth": {"tokens": 3}}')
async def by_body(t: Trial) -> None:
    assert len(contents(await t.ask("", synth={"tokens": 3, "itl": [0, 0.001]}, model="synthetic?tokens=5"))) == 3
    assert (await t.ask("", synth=[3])).status == 400


@sees("synthetic?tokens=3&itl=0")
async def by_model(t: Trial) -> None:
    answer = await t.ask("", model=t.row)
    assert len(contents(answer)) == 3
    assert '"model":"synthetic"' in answer.events()[0]
    assert (await t.ask("", model="other?tokens=3")).status == 404
    assert (await t.ask("", model="synthetic?tokens")).status == 400


@sees('POST /admin/synth {"tokens": 3}')
async def for_all(t: Trial) -> None:
    await t.start()
    changed = await t.get("/admin/synth", "POST", {"tokens": 3, "max_num_seqs": 7})
    assert (changed.json()["knobs"]["tokens"], changed.json()["server"]["max_num_seqs"]) == ("3", 7)
    assert len(contents(await t.ask(""))) == 3
    assert len(contents(await t.ask("tokens=4"))) == 4
    for wrong, said in {
        '{"tokens": 3, "itll": 1}': "itll: unknown knob; the nearest is itl",
        "[]": "must be a JSON object",
        '{"idle_close": 1}': "cannot be changed while it runs",
    }.items():
        refused = await t.get("/admin/synth", "POST", wrong.encode())
        assert refused.status == 400 and said in refused.json()["error"]["message"]
    assert (await t.get("/admin/synth")).json()["knobs"]["tokens"] == "3"
    await t.get("/admin/synth", "DELETE")
    assert len(contents(await t.ask(""))) == 6


@sees("--set tokens=3")
async def by_flag(t: Trial) -> None:
    started: list[server.MockSettings] = []

    def record(settings: server.MockSettings) -> int:
        started.append(settings)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "run", record)
        assert run(["mock", "--set", "tokens=3", "--set", "ttft=0;itl=0", "--fault", "reset@token:2@request:2"]) == 0
        assert run(["mock", "--set", "tokns=3"]) == run(["mock", "--fault", "rest"]) == 2
    (settings,) = started
    mock = await t.start(knobs=settings.knobs, fault=settings.fault)
    assert len(contents(await t.ask("", mock=mock))) == 3
    assert not (await t.ask("", mock=mock)).complete


@sees("x-synth-plan")
async def plan(t: Trial) -> None:
    async def told(answer: Message) -> dict[str, str]:
        return dict(part.partition("=")[::2] for part in (answer.get("x-synth-plan") or "").split(";"))

    await t.start(seed=4)
    found = await told(await t.ask("ttft=uniform:0:0.02;tokens=uniform:3:9;fault=stall:1@token:1-2;eol=crlf"))
    assert (found["index"], found["seed"], found["eol"], found["ttft"]) == ("1", "4", "crlf", "uniform:0:0.02")
    assert 0 <= float(found["first_token"]) <= 0.02
    assert found["fault"] in ("stall:1@token:1", "stall:1@token:2")
    answer = await t.ask("tokens=uniform:3:9", stream=None)
    assert (await told(answer))["length"] == str(answer.json()["usage"]["completion_tokens"])
    assert await told(await t.ask(""))  # an empty one will do
    client = await t.client()
    silent = await client.ask(request("POST", CHAT, {"messages": [], "stream": True}))
    assert silent.get("x-synth-plan") is None


@sees("GET /admin/synth/log", "GET /admin/synth/log/ID")
async def log(t: Trial) -> None:
    await t.ask("fault=close@token:1", fields="X-Request-Id: one\r\n")
    await t.ask("itl=0.005;tokens=4", fields="X-Request-Id: two\r\n")
    await t.ask("fault=status:500", fields="X-Request-Id: three\r\n")
    listed = (await t.get("/admin/synth/log")).json()["requests"]
    assert [(one["id"], one["ended"]) for one in listed] == [("three", "status 500"), ("two", "complete"), ("one", "fault")]
    assert listed[2]["faults"] == ["close@token:1"]
    entry = (await t.get("/admin/synth/log/two")).json()
    assert (entry["index"], entry["path"], entry["plan"]["tokens"]) == (2, CHAT, "4")
    planned = [event["planned_ns"] for event in entry["events"]]
    assert [b - a for a, b in pairwise(planned[2:6])] == pytest.approx([5e6] * 3, abs=5)
    assert all(event["sent_ns"] >= event["planned_ns"] for event in entry["events"])
    assert entry["writes"] == len(entry["events"]) == 7  # head, role, four tokens, [DONE]
    assert (await t.get("/admin/synth/log/none")).status == 404


@sees("tokenpipe_mock_faults_injected_total{fault}")
async def counted(t: Trial) -> None:
    await t.ask("fault=stall:1@token:1,stall:1@token:2")
    await t.ask("fault=status:500")
    await t.ask("fault=stall:1@token:99")  # which never comes
    assert await t.faults() == {"stall": 2, "status": 1}


# as vLLM does ---------------------------------------------------------------------------------------------------------


@sees('"max_tokens": 3', '"ignore_eos": true')
async def cut_short(t: Trial) -> None:
    answer = await t.ask("", max_tokens=3) if "max" in t.row else await t.ask("", max_tokens=9, ignore_eos=True)
    assert (len(contents(answer)), finishes(answer)) == (3 if "max" in t.row else 9, ["length"])
    assert len(contents(await t.ask("", max_tokens=3, max_completion_tokens=2))) == 2


@sees('"n": 2')
async def two_choices(t: Trial) -> None:
    answer = await t.ask("usage=final", n=2)
    found = [choice["index"] for chunk in chunks(answer) for choice in chunk["choices"]]
    assert found == [0, 1] * 7
    assert chunks(answer)[-1]["usage"]["completion_tokens"] == 12


@sees('"stream_options": {"include_usage": true}', '"continuous_usage_stats": true')
async def usage_asked_for(t: Trial) -> None:
    name = "include_usage" if "include" in t.row else "continuous_usage_stats"
    alone = [chunk.get("usage") for chunk in chunks(await t.ask("", stream_options={name: True}))]
    assert len([usage for usage in alone if usage]) == (1 if name == "include_usage" else 0)
    both = await t.ask("", stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(both)] == [0, 1, 2, 3, 4, 5, 6, 6]


@sees('"stream_interval": 3')
async def interval_asked_for(t: Trial) -> None:
    assert len(contents(await t.ask("", stream_interval=3))) == 3  # one, three, and the two that are left
    assert (await t.ask("", stream_interval=0)).status == 400


@sees('"seed": 1')
async def own_seed(t: Trial) -> None:
    mocks = [await t.start(seed=seed) for seed in (1, 2)]
    assert len({(await t.ask("", mock=mock, seed=1)).text() for mock in mocks * 2}) == 1


@sees('"continue_final_message": true')
async def goes_on(t: Trial) -> None:
    """Wherever it was cut: the rest is what is left, and no more of it than may be. Only behind what this seed says."""
    await t.start(tokens=9)
    whole = contents(await t.ask("", seed=1))
    assert len(whole) == 8 + 1
    for cut in (1, 5, 8):
        said = {"role": "assistant", "content": "Behind what was begun: " + "".join(whole[:cut])}
        begun = {"messages": [{"role": "user", "content": "hi"}, said], "seed": 1, "add_generation_prompt": False}
        assert contents(await t.ask("", continue_final_message=True, **begun)) == whole[cut:]
        assert len(contents(await t.ask("", continue_final_message=True, max_tokens=2, **begun))) == min(2, 9 - cut)
        assert contents(await t.ask("", **begun)) == whole
        assert contents(await t.ask("", continue_final_message=True, **{**begun, "seed": 2})) != whole[cut:]
    refused = await t.ask("", continue_final_message=True, messages=[said])
    assert (refused.status, b"add_generation_prompt" in refused.body) == (400, True)
    prompt = {"path": COMPLETIONS, "seed": 1, "max_tokens": 20}
    whole = [chunk["choices"][0]["text"] for chunk in chunks(await t.ask("", prompt="Once", **prompt))]
    rest = [chunk["choices"][0]["text"] for chunk in chunks(await t.ask("", prompt="Once" + "".join(whole[:4]), **prompt))]
    assert rest == whole[4:]


@sees("a reader that pauses")
async def slow_reader(t: Trial) -> None:
    await t.start()
    client = await RawClient.connect(port=int(t.mock.url.rpartition(":")[2]), receive_buffer=4096)
    t.clients.append(client)
    await client.send(t.bytes("", max_tokens=1_000_000, ignore_eos=True))
    assert await standing_still(t.mock) < 100_000


@sees("a client that leaves")
async def leaving(t: Trial) -> None:
    client = await t.send("ttft=30")
    await client.read_response_head()
    client.reset()
    await t.until(lambda: t.mock.running == 0)
    assert await metric(t.mock, "tokenpipe_mock_aborted_requests_total") == 1


@sees("SIGTERM")
async def shutdown(t: Trial) -> None:
    client = await t.send("itl=30")
    head = await client.read_response_head()
    await client.receive_until(b'"content":"')
    await t.mock.stop()
    answer = await client.read_response_body(head)
    assert (finishes(answer), answer.events()[-1]) == (["abort"], "[DONE]")
