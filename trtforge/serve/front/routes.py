"""Triton's HTTP endpoints: the kind of request that each accepts, and the group that must be open for it."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from trtforge.launch.doors import Door
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal

Kind = Literal["health", "plain", "generate", "infer"]
_MODEL = r"/v2/models/[\w.-]+(?:/versions/\d{1,18})?"
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/-]*", re.ASCII)


@dataclass(frozen=True)
class Route:
    """Endpoints of one kind, closed unless the group `door` is open."""

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    kind: Kind = "plain"
    door: Door | None = None


def _route(pattern: str, methods: str, kind: Kind = "plain", door: Door | None = None) -> Route:
    return Route(re.compile(pattern, re.ASCII), tuple(methods.split()), kind, door)


ROUTES = (
    _route(r"/v2/health/(?:live|ready)", "GET", "health"),
    _route(r"/v2", "GET"),
    _route(r"/v2/models/stats", "GET", door="statistics"),
    _route(rf"{_MODEL}/ready", "GET", "health"),
    _route(rf"{_MODEL}/(?:generate|generate_stream)", "POST", "generate"),
    _route(rf"{_MODEL}/infer", "POST", "infer"),
    _route(rf"{_MODEL}/config", "GET", door="model-config"),
    _route(rf"{_MODEL}/stats", "GET", door="statistics"),
    _route(r"/v2/models/[\w.-]+/trace/setting", "GET POST", door="trace"),
    _route(_MODEL, "GET"),
    _route(r"/v2/trace/setting", "GET POST", door="trace"),
    _route(r"/v2/logging", "GET POST", door="logging"),
    _route(r"/v2/repository/index", "POST", door="model-repository"),
    _route(r"/v2/repository/models/[\w.-]+/(?:load|unload)", "POST", door="model-repository"),
    _route(
        r"/v2/(?:system|cuda)sharedmemory(?:/region/[\w.-]+)?/(?:status|register|unregister)",
        "GET POST",
        door="shared-memory",
    ),
)


def find_route(method: str, target: str, opened: Collection[str], limits: FrontLimits) -> tuple[Route, str]:
    """The route of a request and its path without the query. Raises Refusal (400, 403, 404, 405, 414)."""
    path = target.partition("?")[0]
    if len(target) > limits.path_bytes:
        raise Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, f"the path is longer than {limits.path_bytes} bytes")
    if _PLAIN_PATH.fullmatch(path) is None or "//" in path or any(part in (".", "..") for part in path.split("/")):
        raise Refusal(
            HTTPStatus.BAD_REQUEST, "the path must be absolute, of letters, digits, '.', '_' and '-', without '..'"
        )
    for route in ROUTES:
        if route.pattern.fullmatch(path) is None:
            continue
        if route.door is not None and route.door not in opened:
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"{route.door} is closed on this server; trtforge serve --open {route.door} opens it",
            )
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"this endpoint takes {allowed}", {"allow": allowed})
        return route, path
    raise Refusal(HTTPStatus.NOT_FOUND, "there is no such endpoint")
