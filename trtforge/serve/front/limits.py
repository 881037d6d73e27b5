"""All limits of the front."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class FrontLimits:
    """The front's limits.

    Triton 24.10 crashes with SIGSEGV if its recursive JSON parser overflows an 8 MiB stack (between 50,000 and 200,000
    levels), or if the table of a body's pieces does (`alloca` of 16 bytes per piece, about 500,000 pieces). The front's
    limits are far below both, and it sends a body in one piece.
    """

    connections: int = 4096
    """Concurrent connections; more are answered with 503."""
    requests: int = 2048
    """Concurrent requests in Triton, without health checks; more are answered with 503."""
    head_bytes: int = 16 * KIB
    """Request line and headers together."""
    headers: int = 64
    """Header lines."""
    path_bytes: int = 1 * KIB
    json_bytes: int = 1 * MIB
    """A JSON body, or the JSON part of a body with binary tensors."""
    binary_bytes: int = 8 * MIB
    """A whole body with binary tensors."""
    held_bytes: int = 256 * MIB
    """Total size of the bodies of all requests; more are answered with 503."""
    chunks: int = 8192
    """Pieces of a chunked body."""
    depth: int = 32
    """Nested arrays and objects in JSON."""
    containers: int = 16384
    """Arrays and objects in JSON."""
    number_digits: int = 40
    """Characters of one number in JSON."""
    members: int = 128
    """Names in an object whose members become Triton's parameters. Its time grows with the square of their number: a
    few requests of 40,000 names each block all its HTTP threads for longer than the watchdog tolerates."""
    tensors: int = 64
    """Inputs, and outputs, of one inference request."""
    dimensions: int = 8
    """Dimensions of one tensor."""
    elements: int = 4 * MIB
    """Elements of one tensor."""
    head_seconds: float = 10.0
    """From the first byte of a request, or the start of a connection, until its headers are complete."""
    body_seconds: float = 30.0
    """From the headers of a request until its body is complete."""
    idle_seconds: float = 60.0
    """A kept-alive connection without a request."""
    stalled_seconds: float = 60.0
    """A client that does not read its answer."""
    connect_seconds: float = 5.0
    """Until Triton accepts the connection."""
    answer_seconds: float = 60.0
    """Until Triton answers a request that is not inference: health, metadata, settings."""
    linger_seconds: float = 2.0
    """How long the rest of a refused request is read and dropped, so that the client sees the refusal."""
    retry_seconds: int = 1
    """Retry-After of a refusal for load."""
