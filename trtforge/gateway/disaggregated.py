"""Disaggregated serving: some servers compute the context phase, others generate the answers from its result.

As TensorRT-LLM's `disaggregated_serving_bls` (triton_backend/all_models/disaggregated_serving, 1.3.0rc3): first a
request of the type context_only, then the same request as generation_only with the result of the first.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType

from trtforge.gateway.backend import GONE, Backend, BackendError
from trtforge.gateway.generation import require_not_cancelled
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.router import Router


class Disaggregated(Router):
    """A Router of the servers for the generation phase. `contexts`: servers of the same models for the context phase.

    Requests for several answers or for scores of the prompt are not split, nor is any request while no server of
    `contexts` can be reached: the generating servers then compute the prompts too.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        contexts: Sequence[Backend],
        served_name: str | None = None,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(backends, served_name, adapters)
        self._contexts = Router(contexts)

    async def generate(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """See Backend."""
        context = await self._context(request)
        if context is not None:
            request = replace(request, request_type="generation_only", context_phase=context.context_phase)
        async with aclosing(super().generate(request)) as pieces:
            async for piece in pieces:
                if context is not None:
                    piece.cached_tokens = context.cached_tokens
                yield piece

    async def close(self) -> None:
        """See Backend."""
        await self._contexts.close()
        await super().close()

    async def _context(self, request: TextRequest) -> Piece | None:
        """The answer of the context server; None if the request is not split or no context server can be reached.

        Raises BackendError.
        """
        if request.sequences > 1 or request.prompt_logprobs:
            return None
        whole = replace(request, stream=False, request_type="context_only")
        try:
            async with aclosing(self._contexts.generate(whole)) as pieces:
                found = [piece async for piece in pieces]
        except BackendError as error:
            if error.code == GONE:
                return None
            raise
        for piece in found:
            require_not_cancelled(piece)
            if piece.context_phase:
                return piece
        raise BackendError("the server for contexts returned no context_phase_params", "INTERNAL")
