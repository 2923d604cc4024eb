"""The HTTP face: vLLM's paths, its reading of a body, and its refusals.

One handler serves all four inference APIs; what differs between them is in the dialects.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from gateway.synthetic.ask import Body, Limits, listed, texts_of_messages
from gateway.synthetic.chat import Chat
from gateway.synthetic.completions import Completions
from gateway.synthetic.dialect import VERSION, Dialect, created
from gateway.synthetic.generation import Engine, Generation
from gateway.synthetic.messages import Messages, prompt_tokens
from gateway.synthetic.metrics import CONTENT_TYPE
from gateway.synthetic.refusals import VllmRefusal, detail, invalid, unsupported_media_type
from gateway.synthetic.responses import Responses
from gateway.synthetic.text import Vocabulary, json_text, pieces
from gateway.synthetic.wire import EventStream, dress, json_response

DIALECTS: Final[tuple[type[Dialect], ...]] = (Chat, Completions, Responses, Messages)
# vLLM itself takes any size; this only keeps a stand-in from being filled up.
_MAX_BODY: Final = 256 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(engine: Engine) -> web.Application:
    app = web.Application(middlewares=[_refusing], client_max_size=_MAX_BODY)
    app.on_response_prepare.append(dress)
    Routes(engine).add_to(app.router)
    return app


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals, the router's included, in vLLM's words."""
    try:
        return await handler(request)
    except VllmRefusal as refusal:
        return json_response(refusal.render(request.path), refusal.status)
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

    def __init__(self, engine: Engine):
        self._engine = engine
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
            "/health": self.empty,
            "/ping": self.empty,
        }.items():
            router.add_get(path, handler, allow_head=False)
        router.add_get("/metrics", self.metrics)

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """SageMaker's one path for everything: the body tells which API is meant."""
        dialect = Chat if "messages" in await _read(request) else Completions
        return await self.infer(dialect, request)

    async def infer(self, dialect: type[Dialect], request: web.Request) -> web.StreamResponse:
        ask = dialect.read(await _read(request), self._limits)
        with self._engine.admit(ask) as generation:
            shape = dialect(ask, generation, request.headers.get("X-Request-Id"))
            if ask.stream:
                return await _stream(request, shape, generation)
            async for _ in generation.steps():
                pass
        return json_response(shape.whole())

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

    async def empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._engine.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _json(value: Any) -> web.Response:
    return json_response(json_text(value))


async def _stream(request: web.Request, shape: Dialect, generation: Generation) -> web.StreamResponse:
    """The head goes at once, as vLLM's does; then events as they fall due, at the pace the client takes them."""
    response = EventStream()
    await response.prepare(request)
    async with response:
        for kind, data in shape.opening():
            await response.send(data, event=kind)
        async for step in generation.steps():
            for kind, data in shape.step(step):
                await response.send(data, event=kind)
        for kind, data in shape.closing():
            await response.send(data, event=kind)
    return response


async def _read(request: web.Request) -> Body:
    """The body as an object, or vLLM's refusal of it."""
    if request.content_type != "application/json":
        raise unsupported_media_type()
    raw = await request.read()
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
