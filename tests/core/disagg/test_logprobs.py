"""prompt_logprobs: merge (case 9). P's are put into D's whole answer, octet for octet; D is never asked for them."""

from __future__ import annotations

import json

import pytest

from gateway.core.disagg import connector
from gateway.core.disagg.base import Rules
from tests.core.disagg.support import CHAT, COMPLETIONS, GENERATE, PAIR, ask, said
from tests.core.disagg.test_nixl import PARAMS

LOGPROBS = b'[null, {"15": {"logprob": -1.0e-5, "rank": 1}}]'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("name", ["nixl", "lmcache", "offloading_p2p"])
def test_merged(path: bytes, name: str) -> None:
    of = connector(name, Rules(prompt_logprobs="merge"))
    asked = ask(path, sampling_params={"prompt_logprobs": 1}) if path == GENERATE else ask(path, prompt_logprobs=1)
    assert of.judge(asked) is None
    assert b'"prompt_logprobs": 1' in of.prefill(asked, PAIR).body
    choice, top = (b"", b', "prompt_logprobs": ' + LOGPROBS) if path == CHAT else (b', "prompt_logprobs": ' + LOGPROBS, b"")
    answer = b'{"choices": [{"index": 0%b}]%b, "kv_transfer_params": %b}' % (choice, top, PARAMS)
    handoff = of.take(asked, PAIR, answer)
    assert handoff.prompt_logprobs == LOGPROBS
    decode = of.decode(asked, PAIR, handoff)
    assert b"prompt_logprobs" not in decode.body
    assert ("kv_transfer_params" in said(decode)) is (name != "lmcache")
    of_decode = (
        b'{"choices": [ {"index": 0, "prompt_logprobs": null}, {"index": 1}],  "usage": {"x": 1e-5}, "prompt_logprobs": null}'
    )
    merged = of.merged(asked, handoff, of_decode)
    if path == CHAT:
        assert merged == of_decode[:-5] + LOGPROBS + b"}"
    else:
        assert [each["prompt_logprobs"] for each in json.loads(merged)["choices"]] == [json.loads(LOGPROBS)] * 2
        assert merged.count(LOGPROBS) == 2 and merged.endswith(b'],  "usage": {"x": 1e-5}, "prompt_logprobs": null}')


def test_left_alone() -> None:
    of = connector("nixl", Rules(prompt_logprobs="merge"))
    asked = ask(prompt_logprobs=1)
    handoff = of.take(asked, PAIR, b'{"choices": [], "prompt_logprobs": [1], "kv_transfer_params": %b}' % PARAMS)
    for answer in (b"", b"oops", b'{"error": {}}', b'{"choices": []}', b'{"choices": 5}'):
        assert of.merged(asked, handoff, answer) == answer
    assert of.merged(ask(), handoff, b'{"choices": [{}]}') == b'{"choices": [{}]}'
    assert of.merged(asked, handoff._replace(prompt_logprobs=b""), b'{"choices": [{}]}') == b'{"choices": [{}]}'
