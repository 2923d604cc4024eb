"""models.NAME.rewrite_response: the one value changes, and no other octet, wherever the reads cut the answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.edits import Both, UsageStripper, WholeEditor
from gateway.core.rename import EventRenamer, Renaming
from tests.support import script as s

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NAME = 'gpt-4 "ä"'
QUOTED = json.dumps(NAME, ensure_ascii=False).encode()


def renamed(path: str, *pieces: bytes) -> bytes:
    editor = EventRenamer(Renaming(NAME, path))
    out = [piece for given_ in pieces for piece in editor.feed([given_])]
    return b"".join(out + editor.end())


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def stream_of(model: bytes) -> dict[str, bytes]:
    """A stream of each dialect, as a backend would send it that calls the model so. What else looks like a model stays."""
    chat = (
        b'data: {"id":"c","model":%b,"choices":[{"index":0,"delta":{"content":"\\"model\\":\\"llama\\""}}]}\n\n' % model
        + b': "model" ping\n\n'
        + b'data:{"choices" : [{"model":"llama"}] , "model" :\t%b ,"big":12345678901234567890.10}\n\n' % model
        + b'data: {"model":null,"error":{"message":"llama"}}\n\ndata: {"model":\n\ndata: [DONE]\n\n'
    )
    responses = (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","tools":[{"model":"llama"}],'
        b'"model":%b},"message":{"model":"llama"}}\n\n' % model
        + b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"model"}\n\n'
        + b'event: response.completed\ndata: {"response":{"model":%b,"output":["model"]}}\n\n' % model
    )
    messages = (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","model":%b,"usage":{}},'
        b'"response":{"model":"llama"}}\n\n' % model
        + b'event: content_block_delta\ndata: {"delta":{"text":"\\"model\\""}}\n\nevent: message_stop\ndata: {}\n\n'
    )
    return {CHAT: chat, RESPONSES: responses, MESSAGES: messages}


GIVEN, WANTED = stream_of(b'"llama"'), stream_of(QUOTED)
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "lf": bytes,
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "cr": lambda data: data.replace(b"\n", b"\r"),
}


@pytest.mark.parametrize("path", GIVEN)
@pytest.mark.parametrize("form", FORMS)
def test_split_at_every_octet(path: str, form: str) -> None:
    """Cut in two at each place, and octet by octet."""
    stream, wanted = FORMS[form](GIVEN[path]), FORMS[form](WANTED[path])
    assert stream != wanted
    for at in range(len(stream) + 1):
        assert renamed(path, stream[:at], stream[at:]) == wanted, at
    assert renamed(path, *(stream[i : i + 1] for i in range(len(stream)))) == wanted


@given(st.sampled_from(list(GIVEN)), st.lists(st.integers(0, 800), max_size=12))
def test_split_anywhere(path: str, at: list[int]) -> None:
    assert renamed(path, *cut(GIVEN[path], [min(a, len(GIVEN[path])) for a in at])) == WANTED[path]


@pytest.mark.parametrize("size", [70_000, 900_000])
def test_a_long_event_is_renamed(size: int) -> None:
    """/v1/responses repeats all that was asked; it comes in many reads."""
    def long(model: str) -> bytes:
        return s.event({"response": {"instructions": "x" * size, "model": model}}) + s.DONE

    event = long("llama")
    assert renamed(RESPONSES, *(event[i : i + 8192] for i in range(0, len(event), 8192))) == long(NAME)


def test_one_that_is_too_long_passes_and_the_next_is_renamed() -> None:
    event = s.event({"choices": "x" * (2 << 20), "model": "llama"})
    got = renamed(CHAT, *(part[i : i + 65536] for part in (event, GIVEN[CHAT]) for i in range(0, len(part), 65536)))
    assert got == event + WANTED[CHAT]


def test_half_an_event_at_the_end_passes() -> None:
    """Of an answer that was cut short nothing is lost, and nothing made up."""
    assert renamed(CHAT, GIVEN[CHAT] + b'data: {"model":"lla') == WANTED[CHAT] + b'data: {"model":"lla'


WHOLE = [
    (CHAT, b'{"model":"llama","choices":[{"message":{"model":"llama"}}]} \n',
     b'{"model":%b,"choices":[{"message":{"model":"llama"}}]} \n'),
    (CHAT, b'\xef\xbb\xbf{ "x":1e400,"mod\\u0065l":"a","model"\n:"b"}',
     b'\xef\xbb\xbf{ "x":1e400,"mod\\u0065l":%b,"model"\n:%b}'),
    (RESPONSES, b'{"response":{"model":"a"},"model":""}', b'{"response":{"model":%b},"model":%b}'),
    (CHAT, b'{"model":null}', b'{"model":null}'),
    (CHAT, b'{"model":{"model":"a"}}', b'{"model":{"model":"a"}}'),
    (CHAT, b'[{"model":"a"}]', b'[{"model":"a"}]'),
    (CHAT, b'{"model":"a"', b'{"model":"a"'),
    (CHAT, b"", b""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given_", "wanted"), WHOLE)
def test_whole_answers(path: str, given_: bytes, wanted: bytes) -> None:
    """Octet by octet; of a name that is there twice both, as parsers differ in which holds."""
    editor = WholeEditor(Renaming(NAME, path).renamed)
    out = [piece for i in range(len(given_)) for piece in editor.feed([given_[i : i + 1]])]
    assert b"".join(out + editor.end()) == wanted.replace(b"%b", QUOTED)


def test_events_that_begin_alike() -> None:
    """Each is renamed by what it is: one that begins as the one before and names another model behind that, or a longer one."""
    first = s.delta("a", model="llama")
    once_more = first.replace(b'"choices"', b'"model":"other","choices"')
    longer = s.delta("a", model="llama-2")
    stream = first + first + once_more + longer + s.delta("b", model="llama")
    wanted = s.delta("a", model=NAME)
    both = once_more.replace(b'"llama"', QUOTED).replace(b'"other"', QUOTED)
    for at in range(0, len(stream), 7):
        assert renamed(CHAT, stream[:at], stream[at:]) == wanted * 2 + both + wanted + s.delta("b", model=NAME)


def test_beside_another_change() -> None:
    """usage: inject takes its event out, of a stream whose events are renamed."""
    usage = s.event({"model": "llama", "choices": [], "usage": {"prompt_tokens": 1}})
    for at in range(len(usage)):
        both = Both(UsageStripper(), EventRenamer(Renaming(NAME, CHAT)))
        stream = GIVEN[CHAT] + usage
        out = [*both.feed([stream[:at]]), *both.feed([stream[at:]]), *both.end()]
        assert b"".join(out) == WANTED[CHAT]
