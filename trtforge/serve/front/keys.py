"""API keys of the front: a request without one is refused."""

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from trtforge.core.api_keys import ApiKeys, read_key_file
from trtforge.serve.front.refusal import Refusal


class Keys(ApiKeys):
    """The keys of one server, as digests."""

    def require(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Refusal (401) unless a key is given as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
        reason = self.why_refused(headers)
        if reason is not None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, reason, {"www-authenticate": "Bearer"})


def read_keys(file: Path) -> Keys:
    """The keys in `file`: one per line; empty lines and lines that begin with # are ignored. Raises ForgeError."""
    return Keys(read_key_file(file))
