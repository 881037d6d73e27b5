"""TensorRT-LLM's LLM API as an engine: requests of token ids in, tokens out as they are generated.

The API: tensorrt_llm.LLM, SamplingParams and `generate_async` (tensorrt_llm/llmapi/llm.py, sampling_params.py, 1.2 to
1.3). It starts its own processes for several GPUs. Tokenization happens elsewhere. Run as a program, this is the
engine process of a repository of backend llmapi.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from llmapi_arguments import (
    adapters_of,
    cache_arguments,
    llm_arguments,
    lora_request,
    priority_argument,
    read_arguments,
)
from llmapi_sampling import Sampler, sampling_params
from llmapi_scores import log_probs, prompt_log_probs, top_log_probs

from trtforge.core.errors import RequestError, UnclearError
from trtforge.engine_process.admission import QueueLimits
from trtforge.engine_process.host import host
from trtforge.engine_process.requests import (
    FinishReason,
    GenerationRequest,
    OnOutput,
    Output,
    PromptLogProbs,
    TopLogProbs,
)


class LlmApiEngine:
    """A RequestEngine of one `LLM`, with its requests on their own event loop."""

    def __init__(self, arguments: Mapping[str, Any], max_running: int = 1) -> None:
        """`arguments`: those of `tensorrt_llm.LLM`, by its names; `max_running`: its batch size."""
        from tensorrt_llm import LLM, __version__

        self._sampler = Sampler.of(__version__, arguments)
        self._llm = LLM(**llm_arguments(arguments))
        self._adapters = adapters_of(arguments)
        self._accepted = signature(self._llm.generate_async).parameters
        self.max_running = max_running
        self.worker_pids: tuple[int, ...] = ()
        self._after_steps: list[Callable[[], None]] = []
        self._notifying = False
        self._steps = 0
        self._begun: set[str] = set()
        self._running: dict[str, Any] = {}  # None until the LLM API has the request
        self._cancelled: set[str] = set()  # before the LLM API had the request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        """Start requests; the receivers of their outputs are called on the event loop's thread."""
        for request, on_output in requests:
            self._running[request.request_id] = None
            asyncio.run_coroutine_threadsafe(self._run(request, on_output), self._loop)

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        """Cancel a request, unless it has finished. `only_waiting`: only before its first token."""
        self._loop.call_soon_threadsafe(self._abort, request_id, only_waiting)

    def ping(self, on_turn: Callable[[], None]) -> None:
        """Call back from the next iteration of the event loop."""
        self._loop.call_soon_threadsafe(on_turn)

    def after_steps(self, on_step: Callable[[], None]) -> None:
        """Call back from the event loop after the outputs of each iteration."""
        self._after_steps.append(on_step)

    def figures(self) -> dict[str, float]:
        """What is known without the LLM API's own statistics. Iterations are those of the event loop with outputs."""
        running = min(len(self._running), self.max_running)
        return {
            "running": running,
            "active_requests": len(self._running),
            "scheduled_requests": running,
            "waiting_requests": len(self._running) - running,
            "max_requests": self.max_running,
            "iterations": self._steps,
        }

    def check(self) -> None:
        """Does nothing: the LLM API reports the end of its processes through the requests."""

    def close(self) -> None:
        """End the LLM and its processes."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()

    def _abort(self, request_id: str, only_waiting: bool) -> None:
        if request_id not in self._running or (only_waiting and request_id in self._begun):
            return
        running = self._running[request_id]
        if running is None:
            self._cancelled.add(request_id)
        else:
            running.abort()

    async def _run(self, request: GenerationRequest, on_output: OnOutput) -> None:
        answer = Answer(request)
        try:
            lora = lora_request(request.lora_task_id, self._adapters)
            result = self._llm.generate_async(
                list(request.prompt),
                sampling_params(request, self._sampler),
                lora_request=lora,
                streaming=True,
                **priority_argument(request.priority, self._accepted),
                **cache_arguments(request.kv_retention, request.cache_salt, self._accepted),
            )
            self._running[request.request_id] = result
            if request.request_id in self._cancelled:
                result.abort()
            async for step in result:
                try:
                    output = answer.take(step.outputs[0], getattr(step, "cached_tokens", None))
                except RequestError:
                    result.abort()
                    raise
                self._begun.add(request.request_id)
                self._deliver(on_output, output)
                if output.finish_reason is not None:
                    if not step.finished:
                        result.abort()
                    break
        except Exception as error:  # whatever the API raises ends this request, and no other
            self._deliver(on_output, Output(request.request_id, finish_reason="error", error=_failure_of(error)))
        finally:
            self._running.pop(request.request_id, None)
            self._cancelled.discard(request.request_id)
            self._begun.discard(request.request_id)

    def _deliver(self, on_output: OnOutput, output: Output) -> None:
        """Deliver an output; the `after_steps` callbacks run once after all outputs of an event loop iteration."""
        on_output(output)
        if not self._notifying:
            self._notifying = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._notifying = False
        self._steps += 1
        for on_step in self._after_steps:
            on_step()


def _failure_of(error: Exception) -> RequestError:
    """The error of a request. `generate_async` raises ValueError or TypeError for arguments that it does not accept.

    Other errors come from its processes, which raise the same (tensorrt_llm/executor/utils.py, RequestError) for
    requests that they do not accept and when they fail themselves.
    """
    if isinstance(error, RequestError):
        return error
    kind = RequestError if isinstance(error, ValueError | TypeError) else UnclearError
    return kind(str(error), hint="See the server's log.")


class Answer:
    """The answer to a request so far. It includes a matched stop word, but not an end id."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._words = [word for word in request.stop_words if len(word) > 1]
        self._tokens: list[int] = []
        self._cumulative = 0.0

    def take(self, completion: Any, cached_tokens: int | None = None) -> Output:
        """The output of the last step. `completion`: a CompletionOutput, which holds all tokens so far.

        `cached_tokens`: of the GenerationResult (tensorrt_llm/executor/result.py, 1.3.0rc3); None: it has none.
        """
        seen = len(self._tokens)
        new = list(completion.token_ids[seen:])
        finish: FinishReason | None = _FINISHED[completion.finish_reason] if completion.finish_reason else None
        for count in range(1, len(new) + 1):
            self._tokens.append(new[count - 1])
            if any(tuple(self._tokens[-len(word) :]) == word for word in self._words):
                new, finish = new[:count], "stop_word"
                break
        if finish == "length" and new:  # the API looks at the length before its stop words: end ids but the first, too
            may_end = len(self._tokens) > self._request.sampling.min_tokens
            if may_end and new[-1] in self._request.end_ids:
                finish = "end_id"
            elif (new[-1],) in self._request.stop_words:
                finish = "stop_word"
        if finish == "end_id":
            if new and new[-1] in self._request.end_ids:
                new.pop()
            elif new:
                finish = "stop_word"
        scores, top = self._scores(completion, seen, new)
        self._cumulative += sum(scores)
        reused, allocated = _blocks(completion)
        return Output(
            self._request.request_id,
            tuple(new),
            finish,
            log_probs=scores,
            cumulative_log_prob=self._cumulative,
            reused_blocks=reused,
            allocated_blocks=allocated,
            cached_tokens=cached_tokens,
            top_log_probs=top,
            prompt_log_probs=self._prompt_scores(completion) if seen == 0 else None,
        )

    def _scores(self, completion: Any, seen: int, new: list[int]) -> tuple[tuple[float, ...], tuple[TopLogProbs, ...]]:
        """Each new token's log probability, and the most likely tokens in its place."""
        sampling = self._request.sampling
        if not sampling.return_log_probs:
            return (), ()
        entries = completion.logprobs[seen : seen + len(new)]
        return log_probs(new, entries), top_log_probs(entries, sampling.top_log_probs)

    def _prompt_scores(self, completion: Any) -> PromptLogProbs | None:
        """The prompt's scores, which the API gives with the first token; None if not asked for, or cancelled."""
        sampling, prompt = self._request.sampling, self._request.prompt
        if not sampling.prompt_log_probs or not completion.token_ids:
            return None
        return prompt_log_probs(prompt, completion.prompt_logprobs or (), sampling.top_log_probs)


_FINISHED: Mapping[str, FinishReason] = {
    "stop": "end_id",
    "length": "length",
    "timeout": "cancelled",
    "cancelled": "cancelled",
}


def _blocks(completion: Any) -> tuple[int, int]:
    """Number of KV blocks reused and allocated; 0 until the request is finished."""
    metrics = getattr(completion, "request_perf_metrics", None)
    if metrics is None:
        return 0, 0
    cache = metrics.kv_cache_metrics
    return int(cache.num_reused_blocks), int(cache.num_total_allocated_blocks)


def main() -> int:
    """Serve the LLM; the exit status."""
    job = json.loads(sys.argv[1])

    def load() -> LlmApiEngine:
        return LlmApiEngine(read_arguments(Path(job["model_yaml"])), job["max_running"])

    limits = QueueLimits(size=job["max_queue_size"], seconds=job["max_queue_seconds"])
    return host(load, Path(job["socket"]), limits)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
