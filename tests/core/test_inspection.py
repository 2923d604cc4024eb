"""What is read in a request's body, and the single values that the operator's rules put into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.inspection import LENGTH_MEMBERS, Edit, Inspector, Rewritten, TokenRules, members, splice
from gateway.errors import Refusal
from tests.core.test_jsonbody import HIDDEN, REFUSED, documents, pairs

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/responses",
    b"/v1/messages",
)
REJECT = {REFUSED: "reject", "bootstrap_room": "reject"}


def inspector(fields: Mapping[str, str] | None = None, *, usage: bool = False, **tokens: Any) -> Inspector:
    return Inspector(REJECT if fields is None else fields, TokenRules(**tokens), usage)


def rewrite(body: bytes | dict[str, Any], path: bytes = CHAT, **options: Any) -> Rewritten:
    octets = body if isinstance(body, bytes) else json.dumps(body).encode()
    return inspector(**options).rewrite(path, octets)


def refusal(body: bytes, path: bytes = CHAT, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        inspector(**options).rewrite(path, body)
    return caught.value


# --- reading


@pytest.mark.parametrize(
    ("body", "model", "stream"),
    [
        (b'{"model":"m","stream":true}', "m", True),
        (b'{"stream" : false , "model" : "org/m \\u00e9" }', "org/m é", False),
        (b"{}", None, None),
        (b'{"model":1,"stream":"yes"}', None, True),
        (b'{"model":"m","stream":1}', "m", True),
        (b'{"model":"m","stream":"perhaps"}', "m", None),
        (b'{"model":null,"stream":null}', None, None),
        (b'{"model":"a","model":"b"}', "b", None),
        (b'{"messages":[{"model":"x","stream":true}],"model":"m"}', "m", None),
        (b'\xef\xbb\xbf{"model":"m"}', "m", None),
        (b'{"s":"\\ud800","model":"m"}', "m", None),
        (b'{"t":NaN,"x":1e400,"y":-Infinity,"model":"m"}', "m", None),
        (b'{"seed":165598928036513123123,"model":"m","stream":true}', "m", True),
        (b'{"m\\u006fdel":"m"}', "m", None),
        (b'{"model":{"a":1}}', None, None),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b',"model":"m"}', "m", None),
    ],
    ids=lambda v: repr(v)[:60],
)
def test_facts_are_what_an_engine_would_read(body: bytes, model: str | None, stream: bool | None) -> None:
    """The last of doubled members, escapes resolved, whatever else stands in the body."""
    assert inspector().read(body) == (model, stream)
    assert rewrite(body).facts == (model, stream)
    assert rewrite(body).body == body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"x", b'{"a":1', b'{"a":1}x', b"\xff\xfe{\x00}\x00", b'{"a":1,}', b"null"], ids=repr
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """With a reason, as the client's fault."""
    for read in (inspector().read, lambda b: inspector().rewrite(CHAT, b)):
        with pytest.raises(Refusal) as caught:
            read(body)
        assert caught.value.code == "bad_request" and "JSON" in caught.value.message


@pytest.mark.parametrize(
    "key", [b"kv_transfer_params", b"kv_tr\\u0061nsfer_params", b"\\u006bv\\u005Ftransfer_params", b"bootstrap_room"]
)
@pytest.mark.parametrize("value", [b'{"do_remote_prefill":true}', b"1", b'""', b"false", b"[]", b"{}", b"NaN", b'"\\ud800"'])
def test_a_member_that_belongs_to_the_system_is_refused(key: bytes, value: bytes) -> None:
    """In each spelling, at each place, doubled behind a harmless one, with each value but null; its name is told."""
    for body in (
        b'{"' + key + b'":' + value + b"}",
        b'{"model":"m","a":{},"' + key + b'" :' + value + b' ,"z":1}',
        b'{"' + key + b'":null,"' + key + b'":' + value + b"}",
        b'{"' + key + b'":' + value + b',"' + key + b'":null}',
    ):
        for read in (inspector().read, lambda b: inspector().rewrite(CHAT, b)):
            with pytest.raises(Refusal) as caught:
                read(body)
            assert caught.value.code == "bad_request" and caught.value.param in REJECT


def test_null_and_nested_members_are_nobodys_business() -> None:
    """A null says nothing, and only the top level is the engine's."""
    for body in (
        b'{"kv_transfer_params":null,"model":"m"}',
        b'{"a":{"kv_transfer_params":{}},"model":"m"}',
        b'{"kv_transfer_params2":1,"model":"m"}',
    ):
        assert inspector().read(body).model == "m" and rewrite(body).body == body


@settings(max_examples=60)
@given(documents(HIDDEN))
def test_reading_agrees_with_json_loads(document: str) -> None:
    """A member that `loads` sees is refused, and model and stream are those that `loads` sees."""
    body = document.encode()
    seen = dict(pairs(body))
    every = [value for key, value in pairs(body) if key == REFUSED]
    try:
        facts = inspector().read(body)
    except Refusal:
        assert any(value is not None for value in every) or seen.keys() & {"bootstrap_room"}
        return
    assert all(value is None for value in every)
    model = seen.get("model")
    assert facts.model == (model if isinstance(model, str) and model.isprintable() else facts.model)
    assert (facts.model is None) == (not isinstance(model, str))


# --- the length of the answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_a_length_beyond_the_cap_is_clamped(path: bytes) -> None:
    """In place: not another octet changes; what is within the cap passes."""
    for name in LENGTH_MEMBERS[path]:
        body = b'{ "seed":1.0, "%b" :  500 ,"x":1e400}' % name.encode()
        assert rewrite(body, path, cap=100).body == body.replace(b"500", b"100")
        assert rewrite(body, path, cap=500).body == body
        assert rewrite(body, b"/v1/embeddings", cap=100).body == body


@pytest.mark.parametrize("value", [b"500", b"500.0", b"5e2", b'"500"', b"101", b"1e400", b"165598928036513123123"])
def test_no_spelling_of_a_number_gets_past_the_cap(value: bytes) -> None:
    """Engines take floats and strings for numbers; so is the cap's comparison."""
    body = b'{"model":"m","max_tokens":' + value + b"}"
    assert json.loads(rewrite(body, cap=100).body)["max_tokens"] == 100
    refused = refusal(body, cap=100, reject=True)
    assert refused.code == "bad_request" and refused.param == "max_tokens"


def effective(body: bytes, name: str) -> float | None:
    """What pydantic, and so the engine, makes of the last member of that name."""
    value = json.loads(body).get(name)
    return float(value) if isinstance(value, str | int | float) else None


def pydantic_might_take(value: object) -> bool:
    """Whether it may stand for a length: null, a number, or a number in a string."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
    return value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool))


@pytest.mark.parametrize(
    "value",
    [
        b'"\\u0035\\u0030\\u0030"',
        b"500." + b"0" * 1200,
        b'"' + b" " * 1200 + b'500"',
        b'" 500 "',
        b'"\\n500"',
    ],
    ids=lambda v: repr(v)[:24],
)
@pytest.mark.parametrize("reject", [False, True])
def test_no_odd_spelling_gets_past_the_cap(value: bytes, reject: bool) -> None:
    """Nor an escaped digit, nor a number that is too long to be kept."""
    body = b'{"model":"m","max_tokens":' + value + b"}"
    try:
        result = rewrite(body, cap=100, reject=reject).body
    except Refusal as refused:
        assert refused.code == "bad_request"
        return
    asked = effective(result, "max_tokens")
    assert asked is not None and asked <= 100


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens":500,"max_tokens":5}',
        b'{"max_tokens":5,"max_tokens":500}',
        b'{"max_tokens":5,"max_tokens":null}',
        b'{"max_tokens":null,"max_tokens":500}',
        b'{"max_tokens":500,"max_completion_tokens":5}',
        b'{"max_tokens":5,"max_completion_tokens":500}',
        b'{"max_tokens":null,"max_completion_tokens":null}',
        b'{"max_completion_tokens":null,"max_tokens":null}',
        b'{"max_t\\u006fkens":500}',
        b'{"max_completion_tokens":500,"max_completion_tokens":null}',
    ],
)
def test_doubled_and_null_members_do_not_get_past_the_cap(body: bytes) -> None:
    """An engine reads the last of doubled members, and either name: whichever it reads is within the cap."""
    result = rewrite(body, cap=100).body
    given_ = [v for name in ("max_tokens", "max_completion_tokens") if (v := effective(result, name)) is not None]
    assert given_ and max(given_) <= 100


@pytest.mark.parametrize(
    ("path", "rules", "expected"),
    [
        (CHAT, {"default": 50}, ("max_tokens", 50)),
        (CHAT, {"cap": 100}, ("max_tokens", 100)),
        (CHAT, {"default": 500, "cap": 100}, ("max_tokens", 100)),
        (RESPONSES, {"default": 50}, ("max_output_tokens", 50)),
        (RESPONSES, {"cap": 100}, ("max_output_tokens", 100)),
        (COMPLETIONS, {"default": 50}, ("max_tokens", 50)),
        (COMPLETIONS, {"cap": 100}, None),
        (COMPLETIONS, {"cap": 8}, ("max_tokens", 8)),
        (MESSAGES, {"default": 50}, ("max_tokens", 50)),
        (MESSAGES, {"cap": 100}, None),
        (CHAT, {}, None),
        (b"/v1/embeddings", {"default": 5, "cap": 5}, None),
    ],
)
def test_what_is_put_in_where_the_client_says_nothing(
    path: bytes, rules: dict[str, int], expected: tuple[str, int] | None
) -> None:
    """The default, else the cap where the absence would mean no limit; in each dialect's own words."""
    for body in (b'{"model":"m", "x": [1.0]}', b' { "model":"m"} '):
        result = rewrite(body, path, **rules).body
        after = json.loads(result)
        before = json.loads(body)
        assert after == ({**before, expected[0]: expected[1]} if expected else before)
        assert expected is not None or result == body
        assert body[body.index(b'"model"') :] in result
    if expected:
        null = b'{"model":"m","%b":null}' % expected[0].encode()
        assert rewrite(null, path, **rules).body == null.replace(b"null", b"%d" % expected[1])
    own = {"model": "m", LENGTH_MEMBERS.get(path, ("max_tokens",))[0]: 1}
    assert json.loads(rewrite(own, path, **rules).body) == own


def test_an_empty_object_gets_nothing_and_harms_nothing() -> None:
    """There is no model in it: the engine refuses it by itself."""
    assert rewrite(b"{}", default=5, usage=True).body == b"{}"


# --- members taken out


@settings(max_examples=60)
@given(documents(HIDDEN), st.booleans())
def test_strip_takes_exactly_those_members_out(document: str, more: bool) -> None:
    """The rest is the same members in the same order, octet for octet, and the body is a JSON object still."""
    body = document.encode()
    rules = {REFUSED: "strip", **({REFUSED[:-1]: "strip"} if more else {})}
    result = rewrite(body, fields=rules).body
    kept = [m for m in members(body) if m.key not in rules]
    assert [(k, repr(v)) for k, v in pairs(result)] == [(k, repr(v)) for k, v in pairs(body) if k not in rules]
    assert [result[m.begin : m.end] for m in members(result)] == [body[m.begin : m.end] for m in kept]
    if len(kept) == len(members(body)):
        assert result == body


def test_a_rule_for_a_member_that_is_read_anyway() -> None:
    """An operator may forbid `stream` or `model` like any other member."""
    assert rewrite(b'{"stream":true,"a":1}', fields={"stream": "strip"}).body == b'{"a":1}'
    assert refusal(b'{"model":"m"}', fields={"model": "reject"}).param == "model"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"x":1}', b"{}"),
        (b'{ "x":1 }', b"{  }"),
        (b'{"x":1,"a":2}', b'{"a":2}'),
        (b'{"a":2,"x":1}', b'{"a":2}'),
        (b'{"a":2,"x":1,"b":3}', b'{"a":2,"b":3}'),
        (b'{"x":1,"x":2}', b"{}"),
        (b'{"a":2 , "x":1 , "x":3}', b'{"a":2}'),
        (b'{"x":1,"a":2,"x":3}', b'{"a":2}'),
        (b'{"\\u0078":1,"a":2}', b'{"a":2}'),
    ],
)
def test_strip_at_each_place(body: bytes, expected: bytes) -> None:
    """With the one comma that goes with it."""
    assert rewrite(body, fields={"x": "strip"}).body == expected


# --- usage


@pytest.mark.parametrize(
    ("body", "expected", "asked"),
    [
        (b'{"model":"m","stream":true}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":null}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":{}}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":{ }}', {"include_usage": True}, True),
        (
            b'{"stream":true,"stream_options":{"continuous_usage_stats":true}}',
            {"include_usage": True, "continuous_usage_stats": True},
            True,
        ),
        (b'{"stream":true,"stream_options":{"include_usage":false}}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', {"include_usage": True}, False),
        (b'{"stream":true,"stream_options":{"include_usage":1}}', {"include_usage": 1}, False),
        (b'{"stream":"yes","stream_options":{"include_usage":"no"}}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":[]}', [], False),
        (b'{"stream":false}', None, False),
        (b'{"model":"m"}', None, False),
        (b'{"stream":true,"stream_options":{"x":NaN}}', "kept", True),
        (b'{"stream":true,"stream_options":{"x":"' + b"a" * 2000 + b'"}}', "kept", True),
        (b'{"stream":true,"stream_options":{},"stream_options":{"y":1}}', {"include_usage": True, "y": 1}, True),
    ],
    ids=lambda v: repr(v)[:60],
)
def test_usage_is_asked_for_where_the_client_did_not(body: bytes, expected: object, asked: bool) -> None:
    """And the client's other options are still there."""
    for path in (CHAT, COMPLETIONS):
        result = rewrite(body, path, usage=True)
        options = json.loads(result.body).get("stream_options")
        if expected == "kept":
            assert set(options) == {"include_usage", "x"} or result.body == body
        else:
            assert options == expected and result.usage_asked == asked
    for path in (RESPONSES, MESSAGES):
        assert rewrite(body, path, usage=True)[1:] == (body, False)


def test_asking_for_usage_leaves_all_other_octets() -> None:
    """Also within the options, where the client said no."""
    body = b'{"stream":true,"seed":165598928036513123,"stream_options":{"a":1.0, "include_usage" :false,"b":1e2}}'
    result = rewrite(body, usage=True).body
    assert result == body.replace(b"false", b"true")


# --- all at once


@settings(max_examples=60)
@given(
    documents(HIDDEN | st.sampled_from(["max_tokens", "stream", "stream_options", "max_completion_tokens"])),
    st.sampled_from(sorted(LENGTH_MEMBERS)),
    st.booleans(),
)
def test_whatever_is_put_in_the_body_is_still_json(document: str, path: bytes, usage: bool) -> None:
    """Every rule at once on any document: an object, with the client's other members octet for octet."""
    body = document.encode()
    if not all(pydantic_might_take(value) for name, value in dict(pairs(body)).items() if name in LENGTH_MEMBERS[path]):
        refused = refusal(body, path, fields={REFUSED: "strip"}, default=50, cap=100, usage=usage)
        assert refused.code == "bad_request" and refused.param in LENGTH_MEMBERS[path]
        return
    result = rewrite(body, path, fields={REFUSED: "strip"}, default=50, cap=100, usage=usage).body
    touched = {REFUSED, "stream_options", *LENGTH_MEMBERS[path]}
    assert REFUSED not in dict(pairs(result))
    left = [result[m.begin : m.end] for m in members(result) if m.key not in touched]
    assert left == [body[m.begin : m.end] for m in members(body) if m.key not in touched]


def test_edits_are_spliced_from_the_end() -> None:
    """Places are those of the original body, in whatever order the edits come."""
    assert splice(b"abcdef", [Edit(1, 2, b"XX"), Edit(4, 4, b"-"), Edit(5, 6, b"")]) == b"aXXcd-e"
