"""A request's body: what is held of it, what is read in it, and how the rest of it is streamed.

A body is held whole where it is small, or where it may have to be changed. A larger one is sent on as it comes, looked into
on its way: its last octets are held back until it is known to be fit, and no engine can begin with less than all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from gateway.core import form, headers
from gateway.core.framing import LAST_CHUNK, frame
from gateway.core.head import Framing, RequestHead
from gateway.core.inspection import not_json
from gateway.core.jsonbody import Members, NotAnObject
from gateway.core.load import prompt_tokens
from gateway.core.outcome import Outcome
from gateway.core.routing import Route
from gateway.errors import Ended, Refusal
from gateway.net.call import Call, Policy, Upload
from gateway.net.timed import Timed
from gateway.net.upstream import Connection

# Octets of a body that are gathered before it is sent on. Nearly every prompt is smaller, and can then be tried again
# elsewhere; a larger one is streamed, so that memory does not depend on what clients send.
HELD_JSON = 1 << 20
HELD_OTHER = 65536
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY = Upload(b"", 0)


def at_hand(call: Call, head: RequestHead, route: Route, needed: bool) -> Upload | None:
    """The body of the usual request: none, or one that came whole, with its head. `needed`: its model is. Raises Refusal."""
    request = call.request
    if request.body is not None:
        return None
    call.exchange.body_read = request.accepted
    body = request.whole
    if not body:
        return _NO_BODY
    call.exchange.bytes_in = len(body)
    if not _looks(call.policy, head, route, needed):
        return _of_form(call, head, Upload(body, len(body))) if needed else Upload(body, len(body))
    return _looked_into(call, route, body)


def _looks(policy: Policy, head: RequestHead, route: Route, needed: bool) -> bool:
    """Whether the body is to be looked into: an engine would read it as JSON, and some rule asks, or where it goes depends on
    its model. Raises Refusal."""
    if not policy.looks and not needed:
        return False
    kind = headers.media_type(head.named)
    looks = not kind.startswith(b"multipart/") if route.json else kind == b"application/json" or kind.endswith(b"+json")
    coding = head.named.get(b"content-encoding")
    if looks and coding is not None and coding.lower() not in (b"", b"identity"):
        if not policy.looks:
            return False  # nobody asks for more than where it goes: anywhere, as it names no model that we could read
        raise Refusal(
            "unsupported_media",
            f"a request body coded as {coding.decode('latin-1')[:40]} cannot be looked into; send it uncoded, or let the "
            "operator set every rule of `fields` to pass",
        )
    return looks


async def read(call: Call, head: RequestHead, route: Route, needed: bool) -> Upload:
    """A body that is still coming, as far as it must be looked at before anything is sent. `needed`: its model is, and it is
    held until that has come, however late. Raises Refusal."""
    exchange, policy, body = call.exchange, call.policy, call.request.body
    assert body is not None
    looks = _looks(policy, head, route, needed)
    whole = looks and policy.inspector.edits(route.path)
    if policy.pairs is not None and route.path in policy.pairs.paths:
        whole = True
    keyed = route.json and policy.keys is not None and policy.keys.asks_for_body(head.fields)
    judged = looks and policy.looks  # else only its model is asked for
    most = policy.request_body if whole else HELD_JSON if judged or keyed else HELD_OTHER
    if b"expect" in head.named and head.minor and not body.total_bytes:
        call.write(CONTINUE)
    pieces, size = [], 0
    while size <= most and (piece := await _piece(call)):
        pieces.append(piece)
        size += len(piece)
    members = Members()
    if looks and not whole and not body.at_eof():
        for fed in pieces:
            _feed(members, fed)
        while needed and not _models(members) and (piece := await _piece(call)):
            pieces.append(piece)
            size += len(piece)
            _feed(members, piece)
    held = b"".join(pieces)
    del pieces
    exchange.bytes_in = size
    exchange.body_read = time.monotonic()
    length = head.length if head.framing is Framing.LENGTH else None
    if looks and held and body.at_eof():
        return _looked_into(call, route, held)
    if not looks or not held:
        upload = Upload(held, size) if body.at_eof() else Upload(held, length, kept=False)
        return _of_form(call, head, upload) if needed else upload
    exchange.model, exchange.stream = policy.inspector.facts(members.found)
    upload = Upload(held, length, kept=False, members=members)
    upload.models = _models(members) if needed else 0
    return upload


def weigh(call: Call, head: RequestHead, route: Route, upload: Upload) -> None:
    """What the choice of a backend goes by: how long the prompt is, and what it is kept together with others by."""
    if route.json:
        call.tokens = prompt_tokens(upload.length or len(upload.held))
    keys = call.policy.keys
    if keys is not None:
        call.key = keys.find(head.fields, route.path, upload.held if upload.kept and route.json else b"")


def _looked_into(call: Call, route: Route, body: bytes) -> Upload:
    """A JSON body that is whole. Raises Refusal."""
    exchange, inspector = call.exchange, call.policy.inspector
    if not inspector.edits(route.path):
        exchange.model, exchange.stream = inspector.read(body)
        return Upload(body, len(body))
    (exchange.model, exchange.stream), body, call.usage_asked = inspector.rewrite(route.path, body)
    return Upload(body, len(body))


def _of_form(call: Call, head: RequestHead, upload: Upload) -> Upload:
    """An upload, of whose fields one names the model: if that has come with the first of it."""
    kind = head.named.get(b"content-type", b"")
    edge = form.boundary(kind) if kind[:19].lower() == b"multipart/form-data" else None
    upload.place = form.place_of(upload.held, edge, b"model") if edge else None
    if upload.place is not None:
        call.exchange.model = upload.held[slice(*upload.place)].decode("utf-8", "replace")
    return upload


async def _piece(call: Call) -> bytes:
    """The next octets of the body; b"" at its end. Raises Refusal."""
    body, policy = call.request.body, call.policy
    assert body is not None
    piece: bytes | None = None
    with contextlib.suppress(ConnectionResetError):
        # what has arrived is taken without a timer
        piece = body.read_nowait()
        if not piece:
            words = "the request body stalled (timeouts.request_body)"
            with Timed(call, policy.timeouts.request_body, "request_timeout", words):
                piece = await body.readany()
    if piece is None:  # the client has left
        raise asyncio.CancelledError
    if body.total_bytes > policy.request_body:
        raise too_large(policy)
    return piece


async def send_rest(call: Call, connection: Connection, upload: Upload) -> None:
    """Stream what is not held, at the pace of the slower side. Its failures reach the exchange as its own."""
    exchange, body = call.exchange, call.request.body
    try:
        while piece := await _piece(call):
            exchange.bytes_in += len(piece)
            if upload.members is not None:
                # the last octets go out only once all is known to be fit: till then no engine can begin
                _feed(upload.members, piece)
                exchange.model, exchange.stream = call.policy.inspector.facts(upload.members.found)
                if upload.models and _models(upload.members) > upload.models:
                    raise Refusal("bad_request", "the request body names its model twice", param="model")
                if body is not None and body.at_eof() and not upload.members.complete:
                    raise not_json("it ends before the object does")
            connection.write(framed(upload, piece))
            await connection.drain()
            exchange.sent = time.monotonic()  # the wait for an answer begins when all has been sent
        if upload.members is not None and not upload.members.complete:
            raise not_json("it ends before the object does")
        if upload.length is None:
            connection.write(LAST_CHUNK)
    except Refusal as refusal:
        if call.relay is not None:
            call.relay.fail(Ended(Outcome.REFUSED, refusal.message, code=refusal.code))
        else:
            connection.fail(refusal)


def _models(members: Members) -> int:
    """How many of the members found so far name a model."""
    return sum(member.key == "model" for member in members.found)


def too_large(policy: Policy) -> Refusal:
    return Refusal("body_too_large", f"the request body is larger than limits.request_body, {policy.request_body} octets")


def _feed(members: Members, piece: bytes) -> None:
    try:
        members.feed(piece)
    except NotAnObject as error:
        raise not_json(str(error)) from None


def framed(upload: Upload, piece: bytes) -> bytes:
    return piece if upload.length is not None or not piece else frame(piece)
