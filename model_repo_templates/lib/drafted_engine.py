"""An engine model whose tokens a second, smaller engine model drafts; Triton runs both.

Each step asks the draft model for some tokens and the target model to verify them: the target answers with those that
it would have generated itself and one more. Follows `_spec_generate` of tensorrtllm_backend's tensorrt_llm_bls
(all_models/inflight_batcher_llm/tensorrt_llm_bls/1/lib/decode.py and triton_decoder.py at v0.17.0 and v0.18.0, later in
triton_backend of TensorRT-LLM, commit 07f3e442). In addition it streams, and goes on without drafts if the draft model
fails.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from input_names import GUIDE_TYPE, REQUEST_TYPE
from input_values import first_integer
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import RequestFailed
from text_engine import Piece, PieceReceiver
from triton_engine import EngineError, TritonEngine
from word_lists import words_of

_COUNT, _LOGITS = "num_draft_tokens", "use_draft_logits"
_PLAIN = (
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_kv_cache_reuse_stats",
    "return_perf_metrics",
)
"""Requests with one of these get no drafts: what they ask for is of one request to the engine, not of several."""
_PLAIN_INPUTS = (GUIDE_TYPE, "prompt_embedding_table", "decoder_input_ids", "stop", REQUEST_TYPE)
_OF_TARGET = ("lora_task_id", "lora_weights", "lora_config")
_LEAST, _SEED = ("min_tokens", "min_length"), ("seed", "random_seed")
"""Inputs of the engine model from 0.20 on, and before."""
_SEED_BITS = (1 << 64) - 1


class DraftedEngine(TritonEngine):
    """A TextEngine with a draft model, named by `tensorrt_llm_draft_model_name`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._draft_model = config.text("tensorrt_llm_draft_model_name")
        self._most_drafts = config.integer(_COUNT, 0)
        engine_inputs = {theirs for _, theirs in config.pairs("text_to_engine")}
        self._least = next((name for name in _LEAST if name in engine_inputs), _LEAST[0])
        self._seed = next((name for name in _SEED if name in engine_inputs), _SEED[0])

    async def _pass_on(self, inputs: Mapping[str, NDArray[Any]], receiver: PieceReceiver) -> dict[int, int]:
        """Pass the pieces on, drafted where the request allows it."""
        asked = first_integer(inputs, _COUNT, self._most_drafts)
        inputs = {name: value for name, value in inputs.items() if name != _COUNT}
        with_logits = bool(first_integer(inputs, _LOGITS, 0))
        inputs.pop(_LOGITS, None)
        if asked < 0 or asked > self._most_drafts:
            raise RequestFailed(f"{_COUNT} {asked}: the engine verifies 0 to {self._most_drafts} draft tokens")
        if not asked or not _can_be_drafted(inputs):
            return await super()._pass_on(inputs, receiver)
        state = _State(inputs, self._least, self._seed)
        while not state.ended:
            drafted = await self._drafted(state, asked, with_logits)
            if drafted is None:
                return await super()._pass_on(state.rest(), receiver)
            answer = await self._answer(self._model, state.target_inputs(drafted), self._outputs)
            tokens = _tokens(answer)
            state.take(tokens, drafted)
            outputs = {name: answer[name] for name in self._outputs[2:] if name in answer}
            receiver.take([Piece(0, [tokens], False, outputs)])
        return {0: 1}

    async def _drafted(self, state: "_State", asked: int, with_logits: bool) -> "_Draft | None":
        """The draft of one step, empty if no more than one token is left; None if the draft model fails."""
        count = min(asked, state.left - 1)
        if count < 1:
            return _Draft([])
        wanted = [*self._outputs[:2], *(["generation_logits"] if with_logits else [])]
        try:
            answer = await self._answer(self._draft_model, state.draft_inputs(count, with_logits), wanted)
        except EngineError:
            return None
        except Exception as error:  # grpc's own errors of a call that is not a stream
            if getattr(error, "details", None) is None:
                raise
            return None
        tokens = _tokens(answer)[:count]
        logits = answer.get("generation_logits")
        return _Draft(tokens, None if logits is None or not tokens else logits[:, 0, -len(tokens) :])

    async def _answer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: list[str]
    ) -> dict[str, NDArray[Any]]:
        """The one response of a request that does not stream. Raises EngineError, and what grpc raises."""
        found: dict[str, NDArray[Any]] = {}
        async for response in self._responses_of(model, inputs, outputs):
            found = response if "output_ids" in response else found
        return found


class _Draft:
    """Tokens that the target verifies, with their logits if it compares these: (1, tokens, vocabulary)."""

    def __init__(self, tokens: list[int], logits: NDArray[Any] | None = None) -> None:
        self.tokens, self.logits = tokens, logits


class _State:
    """A request that is generated in steps: its prompt, what was generated, and whether it ended.

    `least`, `seed`: the engine's inputs for the least number of tokens and for random numbers.
    """

    def __init__(self, inputs: Mapping[str, NDArray[Any]], least: str, seed: str) -> None:
        self._inputs, self._least_name, self._seed_name = dict(inputs), least, seed
        length = first_integer(inputs, "input_lengths", 0)
        self._prompt: list[int] = inputs["input_ids"][0][:length].tolist()
        self._most = first_integer(inputs, "request_output_len", 0)
        self._least = first_integer(inputs, least, 0)
        self._ends = [[end] for end in (first_integer(inputs, "end_id", -1),) if end >= 0]
        if "stop_words_list" in inputs:
            self._ends += [list(word) for word in words_of(inputs["stop_words_list"][0])]
        self._generated: list[int] = []
        self.ended = self._most < 1

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self._most - len(self._generated)

    def draft_inputs(self, count: int, with_logits: bool) -> dict[str, NDArray[Any]]:
        """The request for a draft of `count` tokens, which no end id ends early."""
        made = self._with_length(count, count)
        made |= {"return_generation_logits": np.array([[True]])} if with_logits else {}
        return {name: value for name, value in made.items() if name not in _OF_TARGET}

    def target_inputs(self, draft: _Draft) -> dict[str, NDArray[Any]]:
        """The request that verifies a draft."""
        made = self._with_length(len(draft.tokens) + 1, self._least - len(self._generated))
        if draft.tokens:
            made["draft_input_ids"] = np.array([draft.tokens], dtype=np.int32)
        if draft.logits is not None:
            made["draft_logits"] = draft.logits
        return made

    def rest(self) -> dict[str, NDArray[Any]]:
        """The request for everything that is left."""
        streaming = self._inputs.get("streaming", np.array([[False]]))
        return self._with_length(self.left, self._least - len(self._generated)) | {"streaming": streaming}

    def take(self, tokens: list[int], draft: _Draft) -> None:
        """Add what the target generated. It ended where it generated nothing, or a whole draft and no more."""
        self._generated += tokens
        all_and_no_more = bool(draft.tokens) and tokens == draft.tokens
        stopped = any(self._generated[-len(end) :] == end for end in self._ends)
        self.ended = not tokens or self.left < 1 or all_and_no_more or stopped

    def _with_length(self, count: int, least: int) -> dict[str, NDArray[Any]]:
        """The request with what was generated as part of its prompt. Each step draws other random numbers."""
        ids = [*self._prompt, *self._generated]
        made = self._inputs | {
            "input_ids": np.array([ids], dtype=np.int32),
            "input_lengths": np.array([[len(ids)]], dtype=np.int32),
            "request_output_len": np.array([[count]], dtype=np.int32),
            "streaming": np.array([[False]]),
        }
        made.pop(self._least_name, None)
        if least > 0:
            made[self._least_name] = np.array([[least]], dtype=np.int32)
        if self._seed_name in made:
            seed = int(made[self._seed_name].flat[0]) + len(self._generated)
            made[self._seed_name] = np.array([[seed & _SEED_BITS]], dtype=np.uint64)
        return made


def _can_be_drafted(inputs: Mapping[str, NDArray[Any]]) -> bool:
    several = any(first_integer(inputs, name, 1) > 1 for name in ("beam_width", "num_return_sequences"))
    asked = any(bool(inputs[name].any()) for name in _PLAIN if name in inputs)
    return not several and not asked and not any(name in inputs for name in _PLAIN_INPUTS)


def _tokens(answer: Mapping[str, NDArray[Any]]) -> list[int]:
    """The new tokens of the first beam; engine models are asked to leave the prompt out."""
    if "output_ids" not in answer:
        return []
    tokens: list[int] = answer["output_ids"][0][0][: int(answer["sequence_length"][0][0])].tolist()
    return tokens


def connected(config: ModelConfig) -> TritonEngine:
    """The engine of a text model: with a draft model if its parameters name one."""
    return DraftedEngine(config) if config.text("tensorrt_llm_draft_model_name") else TritonEngine(config)
