"""What the admin listener answers with: JSON, and errors in the one shape that all of the gateway's have."""

from __future__ import annotations

import json

from aiohttp import web

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "api_error",
    503: "overloaded_error",
}


def reply(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps(content, default=str) + "\n"
    return web.Response(status=status, text=body, content_type="application/json", headers=headers)


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    told = {"message": message, "type": KINDS.get(status, "invalid_request_error"), "param": None, "code": code}
    return reply({"error": told}, status, headers)
