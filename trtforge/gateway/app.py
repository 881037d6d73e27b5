"""The gateway as an ASGI application: routes, and errors of routing in OpenAI's form."""

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from trtforge.gateway.errors import ApiError
from trtforge.gateway.exchange import Exchange, Receive, Scope, Send
from trtforge.gateway.service import Service

HEALTH = "/health"
"""Path of the gateway's own health, independent of the backends."""
_PROBED = ["GET", "HEAD"]


class Answering(Response):
    """A response that one of the service's endpoints writes to the ASGI connection itself."""

    def __init__(self, service: Service, act: Callable[[Exchange], Awaitable[None]]) -> None:
        self._service = service
        self._act = act
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response."""
        await self._act(Exchange(scope, receive, send, self._service.limits))


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="trtforge gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _routing_error)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        return Answering(service, service.chat)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return Answering(service, service.completion)

    @app.post("/v1/responses")
    async def responses() -> Response:
        return Answering(service, service.response)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        async def find() -> object:
            return {"object": "list", "data": await service.models()}

        return await _reply(service, request, find)

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return await _reply(service, request, lambda: service.model(name))

    @app.api_route(HEALTH, methods=_PROBED)
    async def health() -> Response:
        return Response(b"{}", media_type="application/json")

    @app.api_route("/health/ready", methods=_PROBED)
    async def ready() -> Response:
        is_ready = await service.router.ready()
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(json.dumps({"ready": is_ready}).encode(), status, media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        try:
            service.require_host(dict(request.headers.raw))
        except ApiError as error:
            return _error_response(error)
        text, content_type = service.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return app


async def _reply(service: Service, request: Request, find: Callable[[], Awaitable[object]]) -> Response:
    """The result of `find` as JSON, or its error, after checking Host, Origin and key."""
    try:
        service.authorise(dict(request.headers.raw))
        return Response(json.dumps(await find()).encode(), media_type="application/json")
    except ApiError as error:
        return _error_response(error)


async def _routing_error(request: Request, error: Exception) -> Response:
    """The error for an unknown path or a method that the path does not support."""
    assert isinstance(error, HTTPException)
    headers: dict[str, str] = dict(error.headers or {})
    known = "/v1/models, /v1/chat/completions, /v1/responses, /v1/completions"
    message = f"there is no {request.method[:16]} {request.url.path[:100]}; see {known}"
    return _error_response(ApiError(error.status_code, message, headers=headers))


def _error_response(error: ApiError) -> Response:
    values: dict[str, Any] = {"status_code": error.status, "media_type": "application/json"}
    return Response(error.body(), headers=error.headers, **values)
