"""All limits of the gateway."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayLimits:
    """The gateway's limits. OpenAI's own are named where they differ."""

    body_bytes: int = 4 * 1024 * 1024
    body_seconds: float = 30.0
    """From the headers of a request until its body is complete."""
    json_values: int = 500_000
    """Values in the JSON of a body; prompts of token ids need the most."""
    requests: int = 2048
    """Concurrent requests; more are answered with 429."""
    held_bytes: int = 256 * 1024 * 1024
    """Total size of the bodies of all requests; more are answered with 429."""
    messages: int = 4096
    parts: int = 1024
    """Text parts of one message."""
    prompts: int = 1024
    """Prompts of one request for completions; OpenAI takes 2,048 token lists."""
    sequences: int = 128
    """Choices of one request: prompts times n. OpenAI's limit of n is 128."""
    choices: int = 1024
    stop_words: int = 16
    """OpenAI takes 4."""
    stop_bytes: int = 1024
    biased_tokens: int = 1024
    top_logprobs: int = 20
    stalled_seconds: float = 60.0
    """A client that does not read its answer."""
    retry_seconds: int = 1
    """Retry-After of a refusal for load."""
