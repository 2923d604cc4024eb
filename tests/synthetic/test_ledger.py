"""Every prefill that was held ends once."""

from __future__ import annotations

from gateway.synthetic.ledger import End, Ledger


def test_each_end() -> None:
    ledger = Ledger(lease=30, blocks=100)
    for name in ("a", "b", "c"):
        ledger.hold(name, 3, 40, now=0)
    assert ledger.blocks == 9
    assert [held.blocks for held in ledger.held] == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    pulled = ledger.end("a", End.PULLED, now=29)
    assert pulled is not None and pulled.tokens == 40
    assert ledger.end("a", End.REJECTED, now=29) is None
    assert ledger.end("b", End.REJECTED, now=29) is not None
    assert ledger.expire(now=29) == []
    assert [held.request_id for held in ledger.expire(now=30)] == ["c"]
    assert (ledger.held, ledger.blocks, ledger.unknown) == ((), 0, 1)
    assert dict(ledger.ends) == {End.PULLED: 1, End.REJECTED: 1, End.EXPIRED: 1}


def test_a_lease_that_ends_this_moment_has_ended() -> None:
    ledger = Ledger(lease=1, blocks=100)
    ledger.hold("a", 1, 16, now=5)
    assert ledger.end("a", End.PULLED, now=6) is None
    assert ledger.ends[End.PULLED] == 0
    assert len(ledger.expire(now=6)) == 1


def test_blocks_come_round_again() -> None:
    ledger = Ledger(lease=1, blocks=5)
    assert [ledger.hold(str(at), 3, 40, now=0).blocks for at in range(3)] == [(1, 2, 3), (4, 5, 1), (2, 3, 4)]
