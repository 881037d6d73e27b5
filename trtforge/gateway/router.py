"""Several servers as one backend: each request goes to the one with the fewest unfinished requests.

A server that got the prompt's beginning before may have more, as it need not compute that part again.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType

from trtforge.gateway.backend import GONE, Backend, BackendError, ServedModel
from trtforge.gateway.prefixes import Prefixes, parts_of
from trtforge.gateway.request import Piece, TextRequest

_REFRESH = 1.0  # seconds between two queries for the models after an unknown name
_MOST_MORE = 8
"""The most additional unfinished requests of a server that knows a prompt's beginning: one per known part."""


@dataclass(frozen=True)
class Choice:
    """The target of a request's `model`: a text model, perhaps with one of its LoRA adapters; `name`: for clients."""

    model: ServedModel
    name: str
    adapter: int | None = None


class Router:
    """Several servers as one backend. `served_name`: alias of the main model; `adapters`: its LoRA adapters."""

    def __init__(
        self,
        backends: Sequence[Backend],
        served_name: str | None = None,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._backends = tuple(backends)
        self._served_name = served_name
        self._adapters = adapters
        self._outstanding = dict.fromkeys(range(len(self._backends)), 0)  # unfinished requests by the server's position
        self._prefixes = Prefixes(len(self._backends))
        self._places: dict[str, tuple[int, ...]] = {}
        self._models: dict[str, ServedModel] = {}
        self._asked = float("-inf")
        self._asking = asyncio.Lock()

    async def models(self) -> tuple[ServedModel, ...]:
        """See Backend."""
        if not self._models:
            await self._refresh()
        return tuple(self._models.values())

    async def named(self, name: str) -> Choice:
        """The model and adapter with this name for clients. Raises BackendError: NOT_FOUND, or the servers' error."""
        await self.models()
        choices = self._choices()
        if name not in choices:
            await self._refresh()
            choices = self._choices()
        if name not in choices:
            raise BackendError(f"the model {name[:100]!r} does not exist", "NOT_FOUND")
        return choices[name]

    async def names(self) -> tuple[str, ...]:
        """The names of all models and adapters for clients. Raises BackendError."""
        await self.models()
        return tuple(dict.fromkeys(choice.name for choice in self._choices().values()))

    def _choices(self) -> Mapping[str, Choice]:
        """The choices by name: each model's own name and `served_name`, then those of the adapters."""
        found: dict[str, Choice] = {}
        for index, model in enumerate(self._models.values()):
            public = self._served_name if self._served_name is not None and index == 0 else model.name
            found[public] = found[model.name] = Choice(model, public)
        for name, task in self._adapters.items() if self._models else ():
            found.setdefault(name, Choice(next(iter(self._models.values())), name, task))
        return found

    async def ready(self) -> bool:
        """See Backend. True if at least one server is ready."""
        return any(await asyncio.gather(*(backend.ready() for backend in self._backends)))

    async def generate(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """See Backend. If a server cannot be reached, another server with the model serves the request."""
        places = self._places.get(request.model) or tuple(range(len(self._backends)))
        parts = parts_of(request) if len(places) > 1 else []
        left = sorted(places, key=lambda place: self._cost(place, parts))
        while True:
            place = left.pop(0)
            self._outstanding[place] += 1
            self._prefixes.note(place, parts)
            begun = False
            try:
                async with aclosing(self._backends[place].generate(request)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                return
            except BackendError as error:
                if error.code == GONE:
                    self._models, self._asked = {}, float("-inf")
                    self._prefixes.forget(place)
                if error.code != GONE or begun or not left:
                    raise
            finally:
                self._outstanding[place] -= 1

    def _cost(self, place: int, parts: Sequence[bytes]) -> tuple[int, int]:
        """The sort key of a server for a request with these parts."""
        unfinished = self._outstanding[place]
        return unfinished - min(self._prefixes.known(place, parts), _MOST_MORE), unfinished

    async def close(self) -> None:
        """See Backend."""
        await asyncio.gather(*(backend.close() for backend in self._backends))

    async def _refresh(self) -> None:
        """Query all servers for their models. Raises the first error if none answers."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._models and now - self._asked < _REFRESH:
                return
            found = await asyncio.gather(*(backend.models() for backend in self._backends), return_exceptions=True)
            models: dict[str, ServedModel] = {}
            places: dict[str, list[int]] = {}
            for place, answer in enumerate(found):
                if isinstance(answer, BaseException):
                    continue
                for model in answer:
                    models.setdefault(model.name, model)
                    places.setdefault(model.name, []).append(place)
            if not models:
                raise next(answer for answer in found if isinstance(answer, BaseException))
            self._models, self._asked = models, now
            self._places = {name: tuple(each) for name, each in places.items()}
