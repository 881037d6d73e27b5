"""The LoRA adapters that requests may name: the engine's own, and those sent with earlier requests."""

import os
import re
import shutil
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trtforge.core.errors import BusyError, ForgeError, RequestError
from trtforge.engine_process.requests import GenerationRequest, SentAdapter
from trtforge.formats.adapter import ADAPTER_FILES, ADAPTERS_DIRECTORY
from trtforge.machine.owned_files import owned, remove_owned, remove_ownerless
from trtforge.runtime.adapters.parts import adapted_parts
from trtforge.runtime.adapters.rank_adapters import most_adapters
from trtforge.runtime.adapters.sent import Adaptable, name_of, sent_tensors, write_adapter
from trtforge.runtime.ranks.rank_model import placement_of
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.scheduling.rows import Row

_Stamp = tuple[tuple[int, int], ...]
_PREFIX = "trtforge-adapters-"
_MOST_IDS = 10_000
"""Maximum number of task ids that are kept; any number of them may stand for one adapter."""
_SHOWN = 32
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")


def taking_adapters(source: Source) -> Source:
    """The source with a directory for adapters that come with requests, which is created for the first one.

    Directories of killed engines are removed.
    """
    parent = Path(tempfile.gettempdir())
    remove_ownerless(parent, _PREFIX, _NAME)
    if source.forge.features.lora is None:
        return source
    return replace(source, sent_adapters=parent / f"{_PREFIX}{uuid.uuid4().hex}")


class EngineAdapters:
    """Adapters by task id. Used by the engine's thread, until `close`.

    Ranks and KV blocks identify a sent adapter by a digest of its contents, so a task id that is reused for other
    weights finds no blocks computed with the old ones.
    """

    def __init__(self, source: Source, used: Callable[[], Collection[int]]) -> None:
        """`used`: names of the adapters of unfinished requests. Raises ForgeError if no adapter fits the cache.

        The attribute `most` is the number of adapters that fit in each rank's cache at once.
        """
        lora = source.forge.features.lora
        self.most, self._own = 0, range(0)
        self._adaptable: Adaptable | None = None
        if lora is not None:
            spec, place = source.spec(0), placement_of(source, 0)
            self.most, self._own = most_adapters(lora, source.config, spec, place), range(1, len(lora.adapters) + 1)
            parts = [part for each in adapted_parts(spec, source.config, lora.modules).values() for part in each]
            assert lora.max_rank is not None, "an engine's features are resolved"
            self._adaptable = Adaptable(
                {part.module: part for part in parts}, source.config.num_hidden_layers, lora.max_rank, place.dtype
            )
        self._directory = source.directory / ADAPTERS_DIRECTORY
        self._stamps: Mapping[int, _Stamp | None] = {task: self._stamp(task) for task in self._own}
        self._read = set[int]()
        """Names of the adapters of the last step."""
        self._place = source.sent_adapters
        self._owned: ExitStack | None = None
        """Holds the lock of `_place` from the first adapter on, and removes the files."""
        self._used = used
        self._sent: OrderedDict[int, int] = OrderedDict()
        """Names by the clients' task ids, the least recently used first."""
        self._kept: set[int] = set()
        """Names of the adapters in files."""

    def why_refused(self, request: GenerationRequest) -> RequestError | None:
        """Why the request's adapter is refused; None if it is not. Keeps a sent adapter under its task id."""
        task = request.lora_task_id
        if request.sent_adapter is not None:
            try:
                self._keep(task, request.sent_adapter)
            except RequestError as error:
                return error
        elif task is not None and task in self._own:
            return self._why_unreadable(task)
        elif task is not None and not self._holds(self._sent.get(task, 0)):
            return RequestError(f"lora_task_id {task} is not an adapter of this engine", hint=self._known())
        if task is not None and task in self._sent:
            self._sent.move_to_end(task)
        return None

    def resolved(self, request: GenerationRequest) -> GenerationRequest:
        """An accepted request with its adapter's name on the ranks instead of the task id."""
        name = None if request.lora_task_id is None else self._sent.get(request.lora_task_id)
        return request if name is None else replace(request, lora_task_id=name, sent_adapter=None)

    def readable(self, rows: list[Row], end: Callable[..., None]) -> list[Row]:
        """The rows of a step without those whose adapters cannot be read; `end` (see Engine) ends their requests.

        Adapters of the previous step are not checked, because the ranks have loaded them.
        """
        if not self.most:
            return rows
        used = {row.sequence.adapter for row in rows} - {0}
        lost = {name: error for name in used - self._read if (error := self._why_unreadable(name)) is not None}
        self._read = used - lost.keys()
        for sequence in [row.sequence for row in rows if row.sequence.adapter in lost]:
            if sequence.finish_reason is None:
                first = sequence if sequence.group is None else sequence.group.members[0]
                end(first, "error", error=lost[sequence.adapter])
        return [row for row in rows if row.sequence.adapter not in lost]

    def close(self) -> None:
        """Delete the files. May be called again."""
        if self._owned is not None:
            self._owned.close()

    def _why_unreadable(self, name: int) -> RequestError | None:
        """Why ranks cannot read an accepted adapter; None if they can."""
        if name not in self._own:
            hint = "Send lora_weights and lora_config again."
            return None if self._holds(name) else RequestError("the file of the sent adapter was deleted", hint=hint)
        stamp = self._stamps[name]
        if stamp is not None and self._stamp(name) == stamp:
            return None
        return RequestError(
            f"{self._directory / str(name)}: the adapter's files changed after the engine was loaded",
            hint="Load the engine again; if files are missing or damaged, compile it again first.",
        )

    def _known(self) -> str:
        if self._adaptable is None:
            return "This engine has none."
        known = [*self._own, *sorted(self._sent)]
        ids = ", ".join(map(str, known[:_SHOWN])) + (", …" if len(known) > _SHOWN else "")
        more = "" if self._place is None else "Send lora_weights and lora_config with the first request of another id."
        return f"Task ids: {ids}. {more}".strip() if ids else more

    def _stamp(self, task: int) -> _Stamp | None:
        """Sizes and modification times of an engine adapter's files, which ranks read on demand; None if missing."""
        try:
            found = [os.stat(self._directory / str(task) / name) for name in ADAPTER_FILES]
        except OSError:
            return None
        return tuple((each.st_size, each.st_mtime_ns) for each in found)

    def _holds(self, name: int) -> bool:
        """Whether an adapter is in a file. Forgets an adapter whose file a temporary-file cleaner deleted."""
        if name not in self._kept or self._place is None:
            return False
        if (self._place / str(name) / ADAPTER_FILES[1]).is_file():
            return True
        self._forget(name)
        for task in [task for task, of in self._sent.items() if of == name]:
            del self._sent[task]
        return False

    def _forget(self, name: int) -> None:
        assert self._place is not None, "the engine takes adapters"
        shutil.rmtree(self._place / str(name), ignore_errors=True)
        self._kept.discard(name)

    def _keep(self, task: int | None, adapter: SentAdapter) -> None:
        """Keep an adapter under a task id. Raises RequestError."""
        if self._adaptable is None or self._place is None:
            raise RequestError(
                "lora_weights: this engine does not support adapters",
                hint="Compile it with --feature lora, or leave out lora_weights.",
            )
        if task is None:
            raise RequestError("lora_weights needs a lora_task_id", hint="Give the adapter an id of your choice.")
        if task in self._own:
            raise RequestError(
                f"lora_weights cannot be sent for lora_task_id {task}, an adapter of the engine",
                hint=f"Use another lora_task_id, {len(self._own) + 1} or higher.",
            )
        name = name_of(adapter)
        if not self._holds(name):
            tensors = sent_tensors(adapter, self._adaptable)
            self._make_room()
            try:
                self._owned = self._owned or _owning(self._place)
                write_adapter(tensors, self._place / str(name))
            except (ForgeError, OSError) as error:
                shutil.rmtree(self._place / str(name), ignore_errors=True)
                raise RequestError(
                    f"lora_weights could not be stored: {error}", hint=f"Free space in {tempfile.gettempdir()}."
                ) from None
            self._kept.add(name)
        self._sent[task] = name
        while len(self._sent) > _MOST_IDS:
            self._sent.popitem(last=False)

    def _make_room(self) -> None:
        """Delete the least recently used adapters until one more fits. Raises RequestError if all are in use."""
        assert self._place is not None, "the engine takes adapters"
        used = set(self._used())
        while len(self._kept) >= self.most:
            named = set(self._sent.values())
            idle = [name for name in self._kept if name not in named and name not in used]
            if not idle:
                oldest = next((task for task, name in self._sent.items() if name not in used), None)
                if oldest is None:
                    raise BusyError(
                        f"lora_weights: {len(self._kept)} adapters are in use, and no more fit",
                        hint="Send it again later, or compile with more lora.host_memory.",
                    )
                del self._sent[oldest]
                continue
            for name in idle:
                self._forget(name)


def _owning(place: Path) -> ExitStack:
    """Owns the files in `place` until it is closed, which removes them. Raises OSError."""
    with ExitStack() as entered:
        entered.enter_context(owned(place))
        entered.callback(remove_owned, place)
        return entered.pop_all()
