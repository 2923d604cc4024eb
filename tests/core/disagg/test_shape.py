"""The prefill's body by pd.md 6.2, for each API; and which requests are not disaggregated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.disagg import connector
from gateway.core.disagg.base import Bypass, Handoff, Rules
from gateway.errors import Refusal
from tests.core.disagg.support import CHAT, COMPLETIONS, GENERATE, MESSAGE, MESSAGES, PAIR, RESPONSES, ask, said

MUCH = {
    "stop": ["x"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "logprobs": True,
    "top_logprobs": 3,
    "best_of": 4,
    "use_beam_search": False,
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_regex": "a",
    "structured_outputs": {},
    "store": True,
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_completion_tokens": 3,
    "min_tokens": 30,
}
SHAPES_THE_PROMPT = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template": "t",
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "truncate_prompt_tokens": 9,
    "mm_processor_kwargs": {},
    "cache_salt": "s",
    "reasoning_effort": "low",
    "documents": [],
    "priority": 3,
    "user": "u",
    "tool_choice": "auto",
    "temperature": 0.5,
    "seed": 9007199254740993,
}


def prefill(name: str, path: bytes = CHAT, rules: Rules = Rules(), **members: Any) -> dict[str, Any]:
    return said(connector(name, rules).prefill(ask(path, **members), PAIR))


def test_chat() -> None:
    """What shapes the prompt stays as it is; what would cost, steer the one token, or happen twice, goes."""
    found = prefill("nixl", n=4, **MUCH, **SHAPES_THE_PROMPT)
    del found["kv_transfer_params"]
    assert (
        found
        == {
            "model": "m",
            "messages": [MESSAGE],
            "stream": False,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "n": 1,
            "stop": ["x"],
            "stop_token_ids": [5],
            "include_stop_str_in_output": True,
        }
        | SHAPES_THE_PROMPT
    )


@pytest.mark.parametrize("name", ["nixl", "p2p_nccl", "lmcache", "mooncake_ascend"])
def test_a_thinking_budget(name: str) -> None:
    """vLLM refuses one that is not below max_tokens, and takes none below 1,024. What else it is told of thinking passes."""
    engine = connector(name)
    asked = ask(MESSAGES, max_tokens=4000, thinking={"type": "enabled", "budget_tokens": 2000})
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}, None):
        found = engine.shaped(ask(MESSAGES, max_tokens=4000, thinking=thinking), {})
        assert json.loads(found)["thinking"] == thinking
    for body in (engine.shaped(asked, {}), engine.one_token(asked, b"{}")):
        assert json.loads(body)["thinking"] == {"type": "adaptive"}


def test_mooncake_drops_stops() -> None:
    found = prefill("mooncake_ascend", **MUCH)
    assert {"stop", "stop_token_ids", "include_stop_str_in_output"}.isdisjoint(found)
    assert found["min_tokens"] == found["min_completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "given", "limits"),
    [
        (CHAT, {}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (COMPLETIONS, {}, {"max_tokens": 1}),
        (COMPLETIONS, {"max_completion_tokens": 7, "max_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (RESPONSES, {"max_output_tokens": 300}, {"max_output_tokens": 1}),
        (RESPONSES, {}, {"max_output_tokens": 1}),
        (MESSAGES, {"max_tokens": 300}, {"max_tokens": 1}),
    ],
)
def test_limits(path: bytes, given: dict[str, Any], limits: dict[str, int]) -> None:
    found = prefill("nixl", path, **given)
    assert {key: value for key, value in found.items() if key.startswith("max_")} == limits
    assert ("n" in found) is (path in (CHAT, COMPLETIONS))


@pytest.mark.parametrize("name", ["nixl", "mooncake_ascend"])
def test_generate(name: str) -> None:
    """There the limits are within sampling_params, and so is a back door to kv_transfer_params."""
    sampling = {
        "max_tokens": 30,
        "min_tokens": 4,
        "n": 3,
        "logprobs": 2,
        "stop": ["x"],
        "temperature": 0,
        "seed": 12345678901234567890,
        "structured_outputs": {},
        "extra_args": {"kv_transfer_params": {"do_remote_prefill": True}, "own": 1},
    }
    asked = ask(GENERATE, sampling_params=sampling, stream=True)
    found = said(connector(name).prefill(asked, PAIR))["sampling_params"]
    assert found == {"max_tokens": 1, "n": 1, "temperature": 0, "seed": 12345678901234567890, "extra_args": {"own": 1}} | (
        {"stop": ["x"]} if name == "nixl" else {"min_tokens": 1}
    )
    kept = said(connector(name).alone(asked, PAIR))["sampling_params"]
    assert kept == sampling | {"extra_args": {"own": 1}}
    assert prefill(name, GENERATE)["sampling_params"]["max_tokens"] == 1


def test_the_rest_keeps_its_octets() -> None:
    """Case 13: on P, too, numbers and order are the client's."""
    body = b'{"z": 1e-5,"seed":9007199254740993, "max_tokens" :  5,"unknown":{"a":1.0},\n"messages":[ ],"stream":true}'
    leg = connector("mooncake_ascend").prefill(ask(body=body), PAIR)
    begin = b'{"z": 1e-5,"seed":9007199254740993, "max_tokens" :  1,"unknown":{"a":1.0},\n"messages":[ ],"stream":false'
    assert leg.body.startswith(begin)
    json.loads(leg.body)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_tool_choice(choice: object) -> None:
    """Case 8."""
    asked = ask(tool_choice=choice)
    assert connector("nixl").judge(asked) is Bypass.TOOL_CHOICE
    assert connector("nixl", Rules(tool_choice="auto")).judge(asked) is None
    assert prefill("nixl", rules=Rules(tool_choice="auto"), tool_choice=choice)["tool_choice"] == "auto"
    assert prefill("nixl", rules=Rules(tool_choice="pass"), tool_choice=choice)["tool_choice"] == choice
    assert prefill("nixl", MESSAGES, Rules(tool_choice="auto"), tool_choice={"type": "any"})["tool_choice"] == {"type": "auto"}


@pytest.mark.parametrize(
    ("path", "members", "found"),
    [
        (CHAT, {"stream": True}, None),
        (CHAT, {"n": 4}, None),
        (MESSAGES, {"max_tokens": 9}, None),
        (RESPONSES, {}, None),
        (CHAT, {"max_tokens": 1}, Bypass.ONE_TOKEN),
        (CHAT, {"use_beam_search": True, "n": 2}, Bypass.BEAM_SEARCH),
        (COMPLETIONS, {"prompt": ["a"]}, None),
        (COMPLETIONS, {"prompt": ["a", "b"]}, Bypass.PROMPTS),
        (RESPONSES, {"previous_response_id": "r"}, Bypass.STATEFUL),
        (RESPONSES, {"background": True}, Bypass.STATEFUL),
        (b"/v1/embeddings", {"input": "a"}, Bypass.PATH),
        (b"/tokenize", {"prompt": "a"}, Bypass.PATH),
    ],
)
def test_judge(path: bytes, members: dict[str, Any], found: Bypass | None) -> None:
    assert connector("nixl").judge(ask(path, **members)) is found


def test_judge_by_the_rules() -> None:
    assert connector("nixl", Rules(min_prompt_tokens=100)).judge(ask()) is Bypass.SHORT
    assert connector("nixl", Rules(min_prompt_tokens=100)).judge(ask(messages=[MESSAGE] * 50)) is None
    assert connector("nixl", Rules(messages=False)).judge(ask(MESSAGES)) is Bypass.PATH
    with pytest.raises(Refusal, match="2 prompts"):
        connector("nixl", Rules(list_prompts="reject")).judge(ask(COMPLETIONS, prompt=["a", "b"]))
    assert connector("layerwise").judge(ask(COMPLETIONS, prompt=["a", "b"])) is None
    assert connector("layerwise").judge(ask(RESPONSES)) is Bypass.PATH


@pytest.mark.parametrize(
    "members", [{"prompt_logprobs": 1}, {"prompt_logprobs": 0, "stream": True}, {"echo": True, "top_logprobs": 1}]
)
@pytest.mark.parametrize("rule", ["reject", "merge"])
def test_prompt_logprobs(members: dict[str, Any], rule: str) -> None:
    """Case 9: refused, or P computes them and D is never asked to."""
    of, asked = connector("nixl", Rules(prompt_logprobs=rule)), ask(**members)
    if rule == "merge" and not members.keys() & {"stream", "echo"}:
        assert of.judge(asked) is None
        assert members.items() <= said(of.prefill(asked, PAIR)).items()
        assert {"prompt_logprobs", "echo"}.isdisjoint(said(of.decode(asked, PAIR, Handoff(b"{}"))))
    else:
        with pytest.raises(Refusal, match=r"disaggregation\.prompt_logprobs") as refused:
            of.judge(asked)
        assert refused.value.ruling.status == 400


def test_where_nothing_can_be_served_alone() -> None:
    """SGLang's and P2P NCCL's decode engines need a prefill for each request."""
    for name in ("sglang", "p2p_nccl"):
        for members in ({"max_tokens": 1}, {"tool_choice": "required"}):
            assert connector(name, Rules(min_prompt_tokens=10**6)).judge(ask(**members)) is None
    assert said(connector("p2p_nccl").prefill(ask(tool_choice="required"), PAIR))["tool_choice"] == "auto"
    assert connector("sglang").judge(ask(COMPLETIONS, prompt=["a", "b"], n=3)) is None
    assert connector("sglang").judge(ask(prompt_logprobs=1)) is None
    assert connector("sglang").judge(ask(b"/generate", prompt=None, text="a")) is None
    assert connector("sglang").judge(ask(b"/v1/embeddings")) is connector("nixl").judge(ask(b"/generate")) is Bypass.PATH
    for members in ({"n": 2}, {"use_beam_search": True}):
        with pytest.raises(Refusal, match=r"disaggregation\.connector: p2p_nccl"):
            connector("p2p_nccl").judge(ask(**members))
    with pytest.raises(Refusal, match="/v1/responses cannot be disaggregated"):
        connector("p2p_nccl").judge(ask(RESPONSES))


def test_the_sidecar_takes_all() -> None:
    assert connector("sidecar").judge(ask(COMPLETIONS, prompt=["a", "b"], prompt_logprobs=1)) is None
    assert connector("sidecar", Rules(min_prompt_tokens=1000)).judge(ask()) is Bypass.SHORT
