"""`tensorrt_llm` as far as its LLM API goes, with the signatures of 1.2 and 1.3 and no more.

Sources: tests/unittest/api_stability/references_committed/{llm,sampling_params,completion_output}.yaml, and
references/llm.yaml for what is not stable yet; tensorrt_llm/executor/{result,base_worker}.py for the scores. An
argument that they lack is a TypeError, as it is there. Importing it prints a line to standard output, as there.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LLM_ARGUMENTS = {
    "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size", "dtype",
    "revision", "tokenizer_revision", "pipeline_parallel_size", "context_parallel_size", "moe_tensor_parallel_size",
    "moe_expert_parallel_size", "enable_lora", "lora_config", "batched_logits_processor", "guided_decoding_backend",
    "speculative_config", "max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens",
    "load_format", "enable_chunked_prefill", "kv_cache_config", "stream_interval", "backend", "scheduler_config",
    "peft_cache_config", "gather_generation_logits", "iter_stats_max_iterations", "request_stats_max_iterations",
    "enable_attention_dp", "attention_dp_config", "moe_config", "cuda_graph_config",
}  # fmt: skip
STEP_SECONDS = 0.005
__version__ = "1.3.0"
print(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}", flush=True)
MADE: list["LLM"] = []


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_perf_metrics: bool = False
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True


@dataclass(kw_only=True)
class GuidedDecodingParams:
    """tensorrt_llm.sampling_params."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass
class LoRARequest:
    """tensorrt_llm.executor."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class KvCacheRetentionConfig:
    """tensorrt_llm.llmapi, a binding of cpp/tensorrt_llm/nanobind/executor/request.cpp. Durations are timedeltas."""

    @dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None
        priority: int
        duration_ms: timedelta | None = None

        def __post_init__(self) -> None:
            assert isinstance(self.duration_ms, timedelta | None)

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
    ) -> None:
        assert isinstance(decode_duration_ms, timedelta | None)
        self.said = token_range_retention_configs, decode_retention_priority, decode_duration_ms


def likely(token: int, count: int) -> dict[int, SimpleNamespace]:
    """The `count` likeliest tokens where `token` is the likeliest, in no order, as a batch with other counts has it."""
    ranked = [(token + rank, SimpleNamespace(logprob=-0.5 - rank, rank=rank + 1)) for rank in range(count)]
    return dict(reversed(ranked))


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = field(default_factory=list)
    request_perf_metrics: Any = None


class RequestOutput:
    """Answers with its prompt, over and over, one token a step."""

    lora: Any = None
    retention: Any = None

    def __init__(self, prompt: list[int], params: SamplingParams, reused: int = 0) -> None:
        self.prompt_token_ids, self.params, self.reused = prompt, params, reused
        self.cached_tokens = reused
        self.outputs = [CompletionOutput(0)]
        self.finished = self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(STEP_SECONDS)
        answer, params = self.outputs[0], self.params
        if self.aborted:
            answer.finish_reason = "cancelled"
        else:
            token = self.prompt_token_ids[len(answer.token_ids) % len(self.prompt_token_ids)]
            answer.token_ids.append(token)
            if params.logprobs:
                answer.logprobs.append(likely(token, params.logprobs))
            if params.prompt_logprobs:
                following = [*self.prompt_token_ids[1:], answer.token_ids[0]]
                computed = following[self.reused :]
                answer.prompt_logprobs = [likely(each, params.prompt_logprobs) for each in computed]
            assert params.end_id is not None, "it would end at the model's own end ids"
            if token == params.end_id and not params.ignore_eos:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) == params.max_tokens:
                answer.finish_reason = "length"
            elif token in (params.stop_token_ids or ()) and not params.ignore_eos:  # after the length, as TorchSampler
                answer.finish_reason = "stop"
        self.finished = answer.finish_reason is not None
        if self.finished and params.return_perf_metrics:
            cache = SimpleNamespace(num_reused_blocks=1, num_total_allocated_blocks=3)
            answer.request_perf_metrics = SimpleNamespace(kv_cache_metrics=cache)
        return self


class LLM:
    def __init__(self, model: str | Path, **arguments: Any) -> None:
        unknown = set(arguments) - LLM_ARGUMENTS
        if unknown:
            raise TypeError(f"unknown arguments {sorted(unknown)}")
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"no checkpoint at {model}")
        self.model, self.arguments, self.requests, self.running = model, arguments, [], True
        MADE.append(self)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
    ) -> RequestOutput:
        asyncio.get_running_loop()
        assert sampling_params is not None
        if len(inputs) > self.arguments["max_num_tokens"] and not self.arguments["enable_chunked_prefill"]:
            raise ValueError(f"The sum of prompt length ({len(inputs)}) should not exceed max_num_tokens")
        reuses = self.arguments.get("kv_cache_config", {}).get("enable_block_reuse", False)
        known = any(inputs == made.prompt_token_ids for made in self.requests)
        # What an earlier request left is not computed again, so there are no logits of it.
        self.requests.append(RequestOutput(inputs, sampling_params, len(inputs) // 2 if reuses and known else 0))
        self.requests[-1].lora, self.requests[-1].retention = lora_request, kv_cache_retention_config
        return self.requests[-1]

    def shutdown(self) -> None:
        self.running = False
