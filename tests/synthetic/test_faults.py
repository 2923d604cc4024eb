"""The grammar of faults, and what the seed makes of it."""

from __future__ import annotations

from random import Random

import pytest

from gateway.synthetic.behaviour import Capacity, changed, pairs
from gateway.synthetic.faults import CATALOGUE, Place, form, parse, parse_all, strikes


def settled(spec: str, request: int = 1, seed: int = 0) -> str | None:
    strike = parse(spec).strike(request, Random(seed))
    return None if strike is None else str(strike)


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("reset", "reset@head"),
        ("reset@token:3", "reset@token:3"),
        ("reset@token:3-3", "reset@token:3"),
        ("eof_clean", "eof_clean@token:1"),
        ("hang@ms:500", "hang@ms:500"),
        ("status:503", "status:503@head"),
        ("status:503:1", "status:503@head"),
        ("error_event", "error_event:500@token:1"),
        ("error_event:1", "error_event:500@token:1"),
        ("error_event:400:1", "error_event:400@token:1"),
        ("error_event:400@done:1", "error_event:400@done"),
        ("extra", "extra:16@end"),
        ("down:0.5", "down:0.5@head"),
        ("ct:text/plain:1", "ct:text/plain@head"),
        ("stall:5000@token:3@every:1@request:1-2:1", "stall:5000@token:3"),
        ("reset:0", None),
        ("reset@token:3:0.0", None),
        ("reset@every:2", None),
        ("reset@request:2-9", None),
    ],
)
def test_what_is_meant(spec: str, meant: str | None) -> None:
    assert settled(spec) == meant


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rest", "unknown fault 'rest'; the nearest is reset"),
        ("zzz", "expected one of refuse, down"),
        ("reset@tokn:3", "unknown place 'tokn', the nearest is token; expected reset[@head|role|token:N|"),
        ("reset@token", "@token lacks its number"),
        ("reset@token:x", "'x' is not a number or a range"),
        ("reset@token:5-2", "5-2 is out of range: 0 or more, the lower first"),
        ("reset@every:0", "0 is out of range: 1 or more"),
        ("status@head", "nothing stands after the colon; expected status:CODE[@head]"),
        ("status:200", "'200' is not a status from 400 to 599"),
        ("status:503@token:1", "status does not strike at token"),
        ("stall:soon", "'soon' is not a number of milliseconds"),
        ("reset:2", "2 is not a chance from 0 to 1"),
        ("reset@done:often", "'often' is not a chance from 0 to 1"),
        ("reset:0.5:0.5", "'0.5' is left over"),
        ("reset@done:1:1", "'1' is left over"),
        ("ct:a\nb", "is not the value of a header field"),
    ],
)
def test_what_is_wrong_is_said(spec: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(spec)
    assert said in str(error.value)


def test_every_fault_is_read_as_it_is_shown() -> None:
    examples = {"SECONDS": "1", "MS": "1", "BYTES": "50", "CODE": "500", "VALUE": "x", "COUNT": "2", "": ""}
    for name, kind in CATALOGUE.items():
        argument = f":{examples[kind.form]}" if kind.form else ""
        for place in kind.places:
            number = ":7" if place in (Place.TOKEN, Place.MS) else ""
            assert settled(f"{name}{argument}@{place.value}{number}") == f"{name}{argument}@{place.value}{number}"
        assert form(kind).startswith(name)


def test_the_seed_decides() -> None:
    faults = parse_all("reset@token:1-1000:0.5,hang:0.5,status:500@every:3")
    for seed in range(3):
        one, two = [[strikes(faults, at, Random(f"{seed}:{at}")) for at in range(1, 200)] for _ in range(2)]
        assert one == two
    struck = [strike.name for found in one for strike in found]
    assert 60 < struck.count("reset") < 140 and 60 < struck.count("hang") < 140
    assert struck.count("status") == 66
    # one more fault in front of it changes nothing about those of other requests, nor one behind it about itself
    alone = [found for at in range(1, 200) for found in strikes(faults[:1], at, Random(f"2:{at}"))]
    assert alone == [strike for found in one for strike in found if strike.name == "reset"]


def test_none_takes_all_back() -> None:
    assert parse_all("none") == parse_all([]) == ()
    assert len(parse_all(["reset", "hang@token:1"])) == 2


def test_pairs() -> None:
    assert pairs("a=1; b = x%3By ;;fault=ct:a=b") == {"a": "1", "b": "x;y", "fault": "ct:a=b"}
    with pytest.raises(ValueError, match="'b' is not KNOB=VALUE"):
        pairs("a=1;b")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: found 0; expected a number of requests, or none"),
        ({"max_num_seqs": 1.5}, "found 1.5"),
        ({"max_num_seqs": True}, "found True"),
        ({"health": "flap:x"}, "health: found 'flap:x'; expected ok, fail, hang or flap:SECONDS"),
        ({"kv_block": 1}, "kv_block: unknown knob; the nearest is kv_blocks"),
    ],
)
def test_knobs_say_what_they_take(knobs: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as error:
        changed(Capacity(), knobs)
    assert said in str(error.value)
    assert changed(Capacity(max_num_seqs=3), {"max_num_seqs": "none", "kv_blocks": "7"}) == Capacity(kv_blocks=7)
