"""TensorRT-LLM's SamplingParams for a request, and what the sampler of its release does not apply.

Sources: tensorrt_llm/sampling_params.py, executor/base_worker.py, _torch/pyexecutor/sampler.py (TorchSampler,
TRTLLMSampler) and _torch/speculative/mtp.py (MTPSampler, which EAGLE-3 uses too), of 1.0 and 1.3.0rc3;
docs/source/features/sampling.md of 1.3.0rc24; TensorRT-LLM's pull requests 16052 (bad words), 16485 (penalties) and
17172 (seeds) of July and August 2026, which say that the sampler ignored them before.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmapi_arguments import guided_decoding, sampled_in_one_model
from llmapi_scores import score_arguments

from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import GenerationRequest

_PENALTIES = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})
_LATER = _PENALTIES | {"bad_words_list", "runtime_top_p_decay"}
"""What TorchSampler, the default of every release, applies from _COMPLETE on."""
_LOGITS = frozenset({"embedding_bias", "min_tokens"})
_COMPLETE = (1, 3, 0, 24)
_FIRST_WITH_LOGITS = (1, 1, 0, 0)
_NO_END_ID = -1
"""An id of no token. Without an end id, SamplingParams takes the tokenizer's and, as stop ids, those of
generation_config.json (`_setup`); with `ignore_eos` the stop ids of the request are dropped too (base_worker.py)."""


@dataclass(frozen=True)
class Sampler:
    """The sampler of an LLM. `ignored`: inputs without effect; `scores`: whether it returns log probabilities.

    MTPSampler asserts that no request of a batch asks for them, which ends all requests of the batch.
    """

    version: str
    ignored: frozenset[str] = frozenset()
    scores: bool = True

    @classmethod
    def of(cls, version: str, arguments: Mapping[str, Any]) -> "Sampler":
        """The sampler of a release of TensorRT-LLM with these arguments of `tensorrt_llm.LLM`."""
        release = _release(version)
        if release >= _COMPLETE:
            return cls(version)
        if sampled_in_one_model(arguments):
            return cls(version, _LATER | _LOGITS, scores=False)
        if arguments.get("enable_trtllm_sampler") or arguments.get("sampler_type") == "TRTLLMSampler":
            return cls(version)
        return cls(version, _LATER if release >= _FIRST_WITH_LOGITS else _LATER | _LOGITS)

    def end_ids(self, request: GenerationRequest) -> list[int]:
        """The ids that end this request's answer, in order.

        None of an answer that must have all its tokens (as `trtforge bench` asks for) if `min_tokens` would not hold
        them back: it holds back the first one, in samplers that apply it.
        """
        held_back = len(request.end_ids) < 2 and "min_tokens" not in self.ignored
        whole = request.sampling.min_tokens >= request.max_tokens
        return [] if whole and not held_back else sorted(request.end_ids)

    def require(self, request: GenerationRequest) -> None:
        """Raises RequestError for an input that this sampler ignores, and for scores that it does not return."""
        sampling = request.sampling
        asked = {
            "repetition_penalty": sampling.repetition_penalty != 1.0,
            "presence_penalty": sampling.presence_penalty != 0.0,
            "frequency_penalty": sampling.frequency_penalty != 0.0,
            "bad_words_list": bool(request.bad_words),
            "runtime_top_p_decay": sampling.top_p_decay != 1.0,
            "embedding_bias": len(sampling.embedding_bias) > 0,
            "min_tokens": sampling.min_tokens > 0 and bool(self.end_ids(request)),
        }
        for name in ("min_p", "no_repeat_ngram_size", "prompt_ignore_length"):
            if getattr(sampling, name):
                raise RequestError(
                    f"{name}: not every sampler of the LLM API applies it",
                    hint="Leave it out, or serve an engine of backend torch.",
                )
        for name, given in asked.items():
            if given and name in self.ignored:
                raise RequestError(
                    f"{name}: the sampler of TensorRT-LLM {self.version} ignores it",
                    hint="Leave it out, or serve the engine with TensorRT-LLM 1.3.0 or later.",
                )
        scores = {"return_log_probs": sampling.return_log_probs, "return_prompt_logprobs": sampling.prompt_log_probs}
        for name, given in scores.items():
            if given and not self.scores:
                raise RequestError(
                    f"{name}: TensorRT-LLM {self.version} returns no log probabilities with EAGLE-3 and MTP",
                    hint="Leave it out, or compile the engine without engine.features.eagle3 and engine.features.mtp.",
                )


def _release(version: str) -> tuple[int, int, int, float]:
    """Major, minor, patch and the number of the release candidate; an unknown version counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", version)
    if found is None:
        return (1 << 30, 0, 0, 0)
    major, minor, patch, candidate = found.groups()
    return (int(major), int(minor), int(patch), int(candidate) if candidate else float("inf"))


def sampling_params(request: GenerationRequest, sampler: Sampler) -> Any:
    """TensorRT-LLM's SamplingParams. Raises RequestError for what the LLM API cannot do.

    As in the interface of TensorRT-LLM's engines, a request without top_k and top_p is greedy: temperature is ignored,
    and a top_k of 0 is no top_k, which SamplingParams would read as all tokens.
    """
    from tensorrt_llm import SamplingParams

    if any(len(word) > 1 for word in request.bad_words):
        raise RequestError(
            "bad_words: the LLM API supports single-token words only", hint="Leave out words of several tokens."
        )
    sampler.require(request)
    sampling, end_ids = request.sampling, sampler.end_ids(request)
    draws = bool(sampling.top_k) or bool(sampling.top_p)
    decays = draws and sampling.top_p_decay != 1.0
    stops = [*end_ids[1:], *(word[0] for word in request.stop_words if len(word) == 1)]
    return SamplingParams(
        end_id=end_ids[0] if end_ids else _NO_END_ID,
        pad_id=end_ids[0] if end_ids else 0,
        max_tokens=request.max_tokens,
        stop_token_ids=stops or None,
        include_stop_str_in_output=True,
        bad_token_ids=[word[0] for word in request.bad_words] or None,
        embedding_bias=_tensor(sampling.embedding_bias),
        temperature=sampling.temperature if draws else None,
        top_k=sampling.top_k if draws else None,
        top_p=sampling.top_p if draws else None,
        top_p_decay=sampling.top_p_decay if decays else None,
        top_p_min=sampling.top_p_min if decays else None,
        top_p_reset_ids=sampling.top_p_reset_id if decays and sampling.top_p_reset_id >= 0 else None,
        seed=sampling.seed,
        min_tokens=(sampling.min_tokens or None) if end_ids else None,
        repetition_penalty=None if sampling.repetition_penalty == 1.0 else sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
        guided_decoding=guided_decoding(request.guide),
        **score_arguments(sampling, frozenset(field.name for field in fields(SamplingParams))),
        return_perf_metrics=True,
        detokenize=False,
    )


def _tensor(values: Any) -> Any:
    """The embedding bias, float32 [vocab_size]; None if there is none."""
    if not len(values):
        return None
    import torch

    return torch.tensor(values, dtype=torch.float32)
