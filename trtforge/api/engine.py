"""The embedded engine as an object: load, generate, stream, close."""

import asyncio
import itertools
import queue
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, overload

from trtforge.api.answers import Answer, Assembly, Piece
from trtforge.api.hints import hinted
from trtforge.api.options import LoadOptions, seconds_of
from trtforge.api.prompts import Chat, Prompt, Prompts, Tuned, sequences
from trtforge.api.sampling_params import SamplingParams, checked
from trtforge.core.defaults import KV_CACHE_DIR_BYTES
from trtforge.core.detokenizer import shows_first_space
from trtforge.core.errors import ForgeError, RequestError
from trtforge.core.places import artifact_at
from trtforge.core.serving import SchedulerPolicy
from trtforge.core.token_texts import TokenTexts
from trtforge.core.verified import open_to_run
from trtforge.engine_process.requests import Output
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.runtime.engine import Engine as Runtime
from trtforge.runtime.engine import EngineStatistics
from trtforge.runtime.iteration_statistics import IterationStatistics
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.block_events import KvCacheEvent

_GREEDY = SamplingParams()


class Engine:
    """An engine of the torch backend in this process, opened by `Engine.load`; requests run concurrently.

    Methods may be called from any thread.
    """

    def __init__(self, runtime: Runtime, prompts: Prompts) -> None:
        self._runtime = runtime
        self._prompts = prompts
        self._texts = TokenTexts(prompts.tokenizer)
        self._numbers = itertools.count()
        # Ends an engine that is garbage-collected, as when a notebook cell runs again; at exit the runtime ends itself.
        weakref.finalize(self, runtime.close).atexit = False

    @classmethod
    @hinted()
    def load(
        cls,
        directory: str | Path,
        *,
        scheduler: SchedulerPolicy = "guaranteed_no_evict",
        kv_cache_fraction: float = 0.9,
        kv_cache_tokens: int | None = None,
        kv_cache_host_memory_bytes: int | str | None = None,
        kv_reuse: bool | None = None,
        chunked_context: bool | None = None,
        threads: int | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        trace: str | Path | None = None,
        kv_cache_dir: str | Path | None = None,
        kv_cache_dir_bytes: int | str = KV_CACHE_DIR_BYTES,
        kv_event_buffer_max_size: int = 0,
        iter_stats_max_iterations: int = 0,
    ) -> "Engine":
        """Load an engine, or that of a build directory or repository, after comparing its files with its manifest.

        `kv_cache_fraction`: share of the free memory for the KV cache, unless `kv_cache_tokens` gives its size;
        `kv_cache_host_memory_bytes`: host memory per rank for KV blocks evicted from its device; `kv_reuse` and
        `chunked_context` None: as compiled; `max_batch_size` and `max_num_tokens`: lower limits than the engine's;
        `trace`: a file to which every iteration is written. `kv_cache_dir`: directory for KV blocks, at most
        `kv_cache_dir_bytes`, which later engines reuse. Sizes are bytes or text such as "16GB".
        `kv_event_buffer_max_size`, `iter_stats_max_iterations`: the most entries kept for `kv_cache_events` and
        `iteration_statistics`; 0: record none. Raises ForgeError.
        """
        options = LoadOptions.parse(
            {
                "directory": directory,
                "scheduler": scheduler,
                "kv_cache_fraction": kv_cache_fraction,
                "kv_cache_tokens": kv_cache_tokens,
                "kv_cache_host_memory_bytes": kv_cache_host_memory_bytes,
                "kv_reuse": kv_reuse,
                "chunked_context": chunked_context,
                "threads": threads,
                "max_batch_size": max_batch_size,
                "max_num_tokens": max_num_tokens,
                "trace": trace,
                "kv_cache_dir": kv_cache_dir,
                "kv_cache_dir_bytes": kv_cache_dir_bytes,
                "kv_event_buffer_max_size": kv_event_buffer_max_size,
                "iter_stats_max_iterations": iter_stats_max_iterations,
            },
            "Engine.load",
        )
        place = artifact_at(options.directory, "engine")
        source = open_engine(place)
        options.warn_of_limits(source.limits)
        features = source.forge.features
        open_to_run(place, "engine")
        adapters = () if features.lora is None else features.lora.adapters
        prompts = Prompts(place / TOKENIZER_DIRECTORY, source.config.vocab_size, adapters)
        return cls(Runtime.load(place, options.for_engine(features)), prompts)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, params: SamplingParams = _GREEDY
    ) -> Answer: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = _GREEDY
    ) -> list[Answer]: ...

    @hinted()
    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = _GREEDY
    ) -> Answer | list[Answer]:
        """The answer to a prompt, or the answers to several concurrent prompts in their order.

        `params`: for all prompts, or one for each. Raises RequestError if one of the requests is refused, and ends the
        others.
        """
        alone = isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence)
        prompts: Sequence[Prompt] = (prompt,) if alone else prompt  # type: ignore[assignment]
        each = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(each) != len(prompts):
            message = f"there are {len(prompts)} prompts and {len(each)} SamplingParams"
            raise RequestError(message, hint="Give one for all prompts, or one for each.")
        assemblies = [self._assembly(one, of, streamed=False) for one, of in zip(prompts, each, strict=True)]
        pieces: dict[Assembly, list[Piece]] = {assembly: [] for assembly in assemblies}
        for assembly, piece in self._pieces(assemblies):
            pieces[assembly].append(piece)
        answers = [assembly.answer(found) for assembly, found in pieces.items()]
        return answers[0] if alone else answers

    def stream(self, prompt: Prompt, params: SamplingParams = _GREEDY) -> Generator[Piece, None, None]:
        """The pieces of an answer as they are generated; those of several sequences have an `index`.

        Closing the iterator cancels the request. Raises RequestError, also for a `beam_width` above 1.
        """
        for _, piece in self._pieces([self._assembly(prompt, params, streamed=True)]):
            yield piece

    async def astream(self, prompt: Prompt, params: SamplingParams = _GREEDY) -> AsyncGenerator[Piece, None]:
        """Like `stream`, without blocking the event loop."""
        assembly = await asyncio.to_thread(self._assembly, prompt, params, streamed=True)
        async with aclosing(self._apieces(assembly)) as pieces:
            async for piece in pieces:
                yield piece

    async def _apieces(self, assembly: Assembly) -> AsyncGenerator[Piece, None]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output] = asyncio.Queue()

        def hand_over(output: Output) -> None:
            """Called on the engine's thread. The output is dropped if the loop was closed meanwhile."""
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, output)
            except RuntimeError:
                self._runtime.cancel(output.request_id)

        try:
            self._runtime.submit(*((request, hand_over) for request in assembly.requests))
            while not assembly.finished:
                for piece in self._taken(assembly, await outputs.get()):
                    yield piece
        finally:
            self._cancel(assembly)

    async def agenerate(self, prompt: Prompt, params: SamplingParams = _GREEDY) -> Answer:
        """Like `generate` for one prompt, without blocking the event loop."""
        assembly = await asyncio.to_thread(self._assembly, prompt, params, streamed=False)
        async with aclosing(self._apieces(assembly)) as pieces:
            return assembly.answer([piece async for piece in pieces])

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids from this value on are rows of a prompt table."""
        return self._prompts.vocab_size

    def statistics(self) -> EngineStatistics:
        """Requests, KV blocks and tokens: present values and totals."""
        return self._runtime.statistics()

    @hinted()
    def kv_cache_events(self, timeout: float | None = 2.0) -> list[KvCacheEvent]:
        """Events of KV blocks since the last call, the oldest first; like TensorRT-LLM's `get_kv_cache_events`.

        If there are none, it waits for one, at most `timeout` seconds, with None until the engine ends. Beyond
        `kv_event_buffer_max_size` of `load`, the oldest are dropped, which shows in their ids. The events of the blocks
        that a request stored come before its answer's last piece. Events contain the tokens of prompts and answers.
        Raises ForgeError if the engine was loaded without events.
        """
        return self._runtime.observers.kv_cache_events(seconds_of(timeout))

    @hinted()
    def iteration_statistics(self, timeout: float | None = 2.0) -> list[IterationStatistics]:
        """Statistics of the iterations since the last call, the oldest first; like TensorRT-LLM's `get_stats`.

        If there are none, it waits for one, at most `timeout` seconds, with None until the engine ends. Beyond
        `iter_stats_max_iterations` of `load`, the oldest are dropped. An iteration's statistics come after its tokens.
        Raises ForgeError if the engine was loaded without statistics.
        """
        return self._runtime.observers.iteration_statistics(seconds_of(timeout))

    def close(self) -> None:
        """Cancel running requests and end the engine and its processes. May be called again."""
        self._runtime.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        message = "an engine cannot be pickled, which would send it to another process"
        raise ForgeError(message, hint="Load it in the process that uses it.")

    @hinted()
    def _assembly(self, prompt: Prompt, given: object, *, streamed: bool) -> Assembly:
        params = checked(given)
        if streamed and params.beam_width > 1:
            raise RequestError(
                f"beam_width is {params.beam_width}, and beam search has no results before its end",
                hint="Use generate or agenerate, or stream with a beam_width of 1.",
            )
        request = replace(self._prompts.request(prompt, params), streamed=streamed)
        asked = prompt.prompt if isinstance(prompt, Tuned) else prompt
        requests, guide = sequences(request, params.n, next(self._numbers)), request.guide
        continues = not isinstance(asked, Chat) or shows_first_space("" if guide is None else guide.kind)
        new_reader = params.new_reader(asked.functions if isinstance(asked, Chat) else None)
        return Assembly(
            requests,
            params.stop,
            self._texts,
            continues=continues,
            new_reader=new_reader,
            prompt_thought=self._prompts.thought(request.prompt) if isinstance(asked, Chat) else None,
            reasons=new_reader is not None and params.reasoning_parser is not None,
        )

    def _pieces(self, assemblies: Sequence[Assembly]) -> Iterator[tuple[Assembly, Piece]]:
        """Each piece with its assembly, in order of arrival."""
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        of_name = {request.request_id: assembly for assembly in assemblies for request in assembly.requests}
        try:
            asked = [request for assembly in assemblies for request in assembly.requests]
            self._runtime.submit(*((request, outputs.put) for request in asked))
            unfinished = len(assemblies)
            while unfinished:
                output = outputs.get()
                assembly = of_name[output.request_id]
                if assembly.finished:  # by stop words
                    continue
                pieces = self._taken(assembly, output)
                unfinished -= assembly.finished
                for piece in pieces:
                    yield assembly, piece
        finally:
            for assembly in assemblies:
                self._cancel(assembly)

    def _taken(self, assembly: Assembly, output: Output) -> list[Piece]:
        """The pieces of an output, which may end its request before the engine does."""
        pieces = assembly.take(output)
        if output.finish_reason is None and not assembly.runs(output.request_id):
            self._runtime.cancel(output.request_id)
        return pieces

    def _cancel(self, assembly: Assembly) -> None:
        for request in assembly.requests:
            if assembly.runs(request.request_id):
                self._runtime.cancel(request.request_id)
