"""The HTTP face: vLLM's paths, its reading of a body, and its refusals.

One handler serves all four inference APIs; what differs between them is in the dialects. How an answer is to be may be
asked for in three places (`behaviour`): this is where they are put together.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from aiohttp import web

from gateway.synthetic.answer import Answer
from gateway.synthetic.ask import Body, Limits, listed, texts_of_messages
from gateway.synthetic.behaviour import Behaviour, changed, pairs, shown
from gateway.synthetic.chat import Chat
from gateway.synthetic.completions import Completions
from gateway.synthetic.connectors.base import Connector, Incoming
from gateway.synthetic.control import Control
from gateway.synthetic.dialect import VERSION, Dialect, created
from gateway.synthetic.engine import DEATH, Engine
from gateway.synthetic.generation import Generation
from gateway.synthetic.messages import Messages, prompt_tokens
from gateway.synthetic.metrics import CONTENT_TYPE
from gateway.synthetic.outlet import Fields, Raw, Written
from gateway.synthetic.plan import Plan, settle
from gateway.synthetic.refusals import VllmRefusal, bad_request, detail, failed, invalid, unsupported_media_type
from gateway.synthetic.replay import load
from gateway.synthetic.responses import Responses
from gateway.synthetic.sendlog import Entry, SendLog
from gateway.synthetic.settings import allowed
from gateway.synthetic.text import Vocabulary, json_text, pieces
from gateway.synthetic.wire import dress, json_response

DIALECTS: Final[tuple[type[Dialect], ...]] = (Chat, Completions, Responses, Messages)
_PREFIXES: Final[dict[type[Dialect], str]] = {Chat: "chatcmpl", Messages: "chatcmpl", Completions: "cmpl"}
# vLLM itself takes any size; this only keeps a stand-in from being filled up.
_MAX_BODY: Final = 256 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(engine: Engine, transfer: Connector | None) -> web.Application:
    app = web.Application(middlewares=[_refusing], client_max_size=_MAX_BODY)
    app.on_response_prepare.append(dress)
    log = SendLog()
    Routes(engine, log, transfer).add_to(app.router)
    Control(engine, log, transfer).add_to(app.router)
    return app


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals, the router's included, in vLLM's words."""
    try:
        return await handler(request)
    except VllmRefusal as refusal:
        return json_response(refusal.render(request.path), refusal.status, refusal.headers)
    except ConnectionError:
        return Written(keep=False)  # the client has left
    except web.HTTPMethodNotAllowed as refused:
        allowed = {"allow": ", ".join(sorted(refused.allowed_methods))}
        return json_response(detail(405, "Method Not Allowed").render(request.path), 405, allowed)
    except web.HTTPNotFound:
        known = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
        if request.path.endswith("/") and request.path[:-1] in known:
            # FastAPI's own redirect, with the address the client used: a proxy has to notice that.
            target = request.url.with_path(request.path[:-1]).with_query(request.query)
            return web.Response(status=307, headers={"location": str(target)})
        return json_response(detail(404, "Not Found").render(request.path), 404)


class Routes:
    """The handlers of one engine."""

    def __init__(self, engine: Engine, log: SendLog, transfer: Connector | None):
        self._engine, self._log, self._transfer = engine, log, transfer
        self._started = time.monotonic()
        self._limits = Limits(engine.settings.model, engine.settings.max_model_len)
        self._vocabulary = Vocabulary()

    def add_to(self, router: web.UrlDispatcher) -> None:
        for dialect in DIALECTS:
            router.add_post(dialect.path, partial(self.infer, dialect))
        router.add_post("/invocations", self.invoke)
        router.add_post("/v1/messages/count_tokens", self.count_tokens)
        router.add_post("/tokenize", self.tokenize)
        router.add_post("/detokenize", self.detokenize)
        router.add_post("/ping", self.empty)
        for path, handler in {
            "/v1/models": self.models,
            "/version": self.version,
            "/load": self.load,
            "/health": self.health,
            "/ping": self.empty,
        }.items():
            router.add_get(path, handler, allow_head=False)
        router.add_get("/metrics", self.metrics)

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """SageMaker's one path for everything: the body tells which API is meant."""
        dialect = Chat if "messages" in await _read(request) else Completions
        return await self.infer(dialect, request)

    async def infer(self, dialect: type[Dialect], request: web.Request) -> web.StreamResponse:
        engine = self._engine
        index = engine.arrive()
        asked = _asked(request)
        plan = self._settle(index, asked)
        body = await _read(request, plan)
        within = _asked_within(body)
        if within:
            plan = self._settle(index, {**within, **asked})
        if plan.behaviour.replay is not None:
            return await self._replay(request, plan)
        if engine.dead:
            raise failed(500, DEATH)
        try:
            ask = dialect.read(body, self._limits)
            if self._transfer is not None:
                ask = self._transfer.shape(ask)
            if engine.full(ask.choices):
                retry = {"retry-after": str(plan.behaviour.retry_after)}
                raise failed(503, "The request queue is full: max_num_queued_reqs is reached.", retry)
        except VllmRefusal:
            if self._transfer is not None:
                self._transfer.refused(body)
            raise
        generation = Generation(engine, ask, plan)
        entry = self._enter(request, plan, generation.id, generation.length, generation.first_token)
        if self._transfer is not None:
            sent = request.headers.get("X-Request-Id")
            name = f"{_PREFIXES.get(dialect, 'resp')}-{sent or generation.id}"
            self._transfer.prepare(ask, generation, Incoming(name, sent))
        fields: Fields = []
        if "x-synth" in request.headers:
            fields.append(("x-synth-plan", ";".join(f"{name}={value}" for name, value in entry.plan().items())))
        slow = plan.struck("slow_read")
        if slow is not None:
            engine.metrics.faults[slow.name].inc()
            entry.faults.append(str(slow))
        try:
            with generation:
                return await Answer(request, engine, ask, generation, dialect, entry, fields).give()
        finally:
            if generation.prelude is not None and self._transfer is not None:
                self._transfer.refused(body)  # it never came to the pull

    def _settle(self, index: int, asked: Mapping[str, object]) -> Plan:
        engine = self._engine
        try:
            behaviour = changed(engine.behaviour, asked)
            if asked:
                behaviour = allowed(behaviour, embedded=engine.settings.embedded)
        except ValueError as error:
            raise bad_request(f"x-synth: {error}.") from None
        return settle(behaviour, engine.seed, index)

    def _enter(self, request: web.Request, plan: Plan, id_: str, length: int = 0, first_token: float = 0.0) -> Entry:
        told = partial(_told, plan, self._engine.behaviour, length, first_token)
        name = request.headers.get("X-Request-Id") or id_
        return self._log.begin(Entry(name, request.path, plan.index, time.monotonic(), told))

    async def _replay(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        """A recorded answer instead of one of our own; no slot. Faults are refused: no place of it is known but its bytes."""
        behaviour, folder = plan.behaviour, self._engine.settings.replay
        if folder is None:
            raise bad_request("x-synth: replay: no folder of recordings was given: start with --replay FOLDER.")
        assert behaviour.replay is not None
        if behaviour.fault:
            raise bad_request("x-synth: replay: a recorded answer takes no faults: leave fault out, or ask for fault=none.")
        try:
            recording = load(folder, behaviour.replay)
        except ValueError as error:
            raise bad_request(f"x-synth: replay: {error}.") from None
        entry = self._enter(request, plan, plan.random("id").randbytes(8).hex())
        raw, start = Raw(request, behaviour, entry), time.monotonic()
        for moment, piece in recording.pieces:
            due = start + moment / behaviour.speed
            await self._engine.sleep_until(due)
            await raw.write(piece)
            entry.add(due, time.monotonic(), len(piece))
        entry.ended = "complete" if recording.whole else "cut"
        return raw.done() if recording.whole else await raw.close()

    async def count_tokens(self, request: web.Request) -> web.Response:
        count = prompt_tokens(await _read(request))
        return _json({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await _read(request)
        prompt = body.get("prompt")
        texts = [prompt] if isinstance(prompt, str) else texts_of_messages(listed(body, "messages"))
        found = [piece for text in texts for piece in pieces(text)]
        return _json(
            {
                "count": len(found),
                "max_model_len": self._limits.max_model_len,
                "tokens": self._vocabulary.encode(found),
                "token_strs": found if body.get("return_token_strs") else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        tokens = listed(await _read(request), "tokens")
        if not all(isinstance(token, int) for token in tokens):
            raise invalid("int_type", "body.tokens", "Input should be a valid integer", tokens)
        return _json({"prompt": self._vocabulary.decode(tokens)})

    async def models(self, request: web.Request) -> web.Response:
        now = created()
        permission = {
            "id": "modelperm-synthetic",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self._limits.model,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": self._limits.model,
            "parent": None,
            "max_model_len": self._limits.max_model_len,
            "permission": [permission],
        }
        return _json({"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def load(self, request: web.Request) -> web.Response:
        return _json({"server_load": self._engine.running})

    async def health(self, request: web.Request) -> web.Response:
        health, age = self._engine.capacity.health, time.monotonic() - self._started
        if health == "hang":
            await asyncio.get_running_loop().create_future()
        flapped = health.startswith("flap:") and int(age / float(health[5:])) % 2 == 1
        well = not (self._engine.dead or health == "fail" or flapped or age < self._engine.capacity.startup)
        return web.Response(status=200 if well else 503)

    async def empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._engine.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _json(value: Any) -> web.Response:
    return json_response(json_text(value))


def _asked(request: web.Request) -> dict[str, object]:
    """What the x-synth header asks for."""
    try:
        return {**pairs(";".join(request.headers.getall("x-synth", ())))}
    except ValueError as error:
        raise bad_request(f"x-synth: {error}.") from None


def _asked_within(body: Body) -> dict[str, object]:
    """What the body asks for: after its model's name, and above that in an object of its own."""
    model, own = body.get("model"), body.get("synth")
    if own is not None and not isinstance(own, dict):
        raise invalid("dict_type", "body.synth", "Input should be a valid dictionary", own)
    try:
        named = pairs(model.partition("?")[2], "&") if isinstance(model, str) and "?" in model else {}
    except ValueError as error:
        raise bad_request(f"model: {error}.", "model") from None
    return {**named, **(own or {})}


def _told(plan: Plan, usual: Behaviour, length: int, first_token: float) -> dict[str, str]:
    """A plan in words: where it comes in the order, what is not as the server has it for everybody, and what came of it:
    of a recording nothing, its `length` is 0."""
    told = {"index": str(plan.index), "seed": str(plan.seed)}
    always = {name: getattr(plan.behaviour, name) for name in ("ttft", "itl", "tokens")}
    found, before = shown(plan.behaviour), shown(usual)
    told |= {name: " ".join(str(found[name]).split()) for name in found if name in always or found[name] != before[name]}
    told["fault"] = ",".join(map(str, plan.strikes)) or "none"
    if length:
        told |= {"length": str(length), "first_token": f"{first_token:.6g}"}
    return told


async def _read(request: web.Request, plan: Plan | None = None) -> Body:
    """The body as an object, or vLLM's refusal of it."""
    if request.content_type != "application/json":
        raise unsupported_media_type()
    slow = None if plan is None else plan.struck("slow_read")
    raw = await request.read() if slow is None else await _read_slowly(request, slow.argument)
    if not raw:
        raise invalid("missing", "body", "Field required", None)
    try:
        body = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise detail(400, "There was an error parsing the body") from None
    except json.JSONDecodeError as error:
        raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}, {"error": error.msg}) from None
    if not isinstance(body, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", text, body)
    return body


async def _read_slowly(request: web.Request, rate: object) -> bytes:
    """So many bytes a second, so that the client is held back once the buffers between are full."""
    assert isinstance(rate, int)
    body, start = bytearray(), time.monotonic()
    async for piece in request.content.iter_chunked(max(1, rate // 20)):
        body += piece
        await asyncio.sleep(max(0.0, start + len(body) / rate - time.monotonic()))
    return bytes(body) or await request.read()  # somebody had read it already
