"""The gateway's own Prometheus metrics."""

from http import HTTPStatus
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

Endpoint = Literal["chat", "completions", "responses"]
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "trtforge_gateway_requests",
            "Requests by endpoint and HTTP status; 499: the client left.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.running = Gauge("trtforge_gateway_requests_running", "Requests at present.", registry=self._registry)
        self.seconds = Histogram(
            "trtforge_gateway_request_seconds",
            "Seconds from a request's headers to the end of its response.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_seconds = Histogram(
            "trtforge_gateway_first_token_seconds",
            "Seconds from a request's headers to its first event, of streams.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.prompt_tokens = Counter("trtforge_gateway_prompt_tokens", "Prompt tokens.", registry=self._registry)
        self.completion_tokens = Counter(
            "trtforge_gateway_completion_tokens", "Generated tokens.", registry=self._registry
        )

        for endpoint in get_args(Endpoint):  # from 0 on, so that a rate includes the first request
            self.requests.labels(endpoint, str(int(HTTPStatus.OK)))
            self.seconds.labels(endpoint)
            self.first_seconds.labels(endpoint)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that a request's Accept header asks for, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
