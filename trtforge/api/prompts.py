"""Prompts and options of the Python API as requests to the engine."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from trtforge.api.prompt_tables import prompt_table
from trtforge.core.errors import ForgeError, RequestError, first_line
from trtforge.engine_process.requests import (
    DEFAULT_PRIORITY,
    MOST_LENGTH_PENALTY,
    BeamParams,
    DraftTokens,
    GenerationRequest,
    Guide,
    LookaheadSizes,
    PromptTable,
    with_seed,
)
from trtforge.engine_process.requests import SamplingParams as EngineSampling
from trtforge.engine_process.retention import LONGEST_SALT, KvCacheRetention
from trtforge.formats.chat_template import read_chat_template
from trtforge.formats.special_tokens import read_special_tokens
from trtforge.formats.tokenizer import TOKENIZER_FILE, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Chat:
    """Messages, each a mapping with `role` and `content`, which the tokenizer's chat template makes a prompt of.

    `tools`: functions that the template describes to the model, as in OpenAI's API.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Tokens:
    """A prompt of token ids. Those from the engine's `vocab_size` on are rows of `prompt_table` (rows, hidden size).

    A table is a tensor or an array, of an engine that was compiled with `max_prompt_embedding_table_size`. `extra_ids`:
    of each token; rows with different ones share no KV blocks.
    """

    ids: Sequence[int]
    prompt_table: object = None
    extra_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Tuned:
    """A text or messages after all rows of `prompt_table` (rows, hidden size), as prompt tuning computes them."""

    prompt: str | Chat | Tokens
    prompt_table: object


Prompt = str | Chat | Tokens | Tuned
_MOST_SEQUENCES = 128
_MOST_ID = 2**31 - 1


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """Options of a request: greedy unless `top_k` or `top_p` is given, as in TensorRT-LLM.

    `seed` None counts as 0, so that equal requests get equal tokens. `stop`: the text ends before the first of these;
    `bad`: words that are not generated, with or without a space before them, unless in other tokens than the tokenizer
    gives them. `log_probs`: score each token, with `top_log_probs` alternatives. `json_schema` (a schema, such as a
    pydantic class's `model_json_schema()`, or its JSON text), `regex` or `grammar` (EBNF, with a rule root): what the
    answer must be, by the package xgrammar. `prompt_log_probs`: score the prompt's tokens too. `logit_bias`: what is
    added to the logits of these token ids; minus infinity rules a token out. After each token `top_p` is multiplied by
    `top_p_decay`, down to `top_p_min`, and is as at the beginning after `top_p_reset_id`. `adapter`: name of a LoRA
    adapter of the engine. `priority`: from 0 to 1; of waiting requests the highest runs first. `kv_retention`: how long
    KV blocks are kept for later prompts; `cache_salt`: share them only with its requests. `lookahead`: window,
    n-gram and verification set sizes, at most those of an engine with lookahead decoding; (1, 1, 0): no draft tokens.

    `n`: sequences of the prompt, sampled with `seed`, `seed` + 1 and so on; with a `beam_width` above 1 the best beams
    of a search, which ends as `length_penalty` and `early_stopping` say and samples nothing. `context_logits`,
    `generation_logits`: return those of an engine that was compiled with these features.

    `draft_input_ids`: tokens that the answer may begin with, which the engine verifies. `draft_logits`, an array (draft
    tokens, vocabulary), of whose softmax they were drawn, and `draft_acceptance_threshold` say what is accepted of them
    when tokens are sampled.
    """

    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    bad: Sequence[str] = ()
    ignore_end: bool = False
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    logit_bias: Mapping[int, Annotated[float, Field(lt=inf)]] | None = None
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    adapter: str | None = None
    priority: float = DEFAULT_PRIORITY
    lookahead: tuple[int, int, int] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_SEQUENCES)] = 1
    beam_width: Annotated[int, Field(ge=1)] = 1
    length_penalty: Annotated[float, Field(ge=-MOST_LENGTH_PENALTY, le=MOST_LENGTH_PENALTY)] = 0.0
    early_stopping: bool = True
    context_logits: bool = False
    generation_logits: bool = False
    draft_input_ids: Sequence[Annotated[int, Field(ge=0, le=_MOST_ID)]] = ()
    draft_logits: Any = None
    draft_acceptance_threshold: float = 0.0
    kv_retention: KvCacheRetention | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = None

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = []
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not type(each.default) or value != each.default:
                given.append(f"{each.name}={value!r}")
        return f"SamplingParams({', '.join(given)})"

    def guide(self) -> Guide | None:
        """The guide that is given. Raises RequestError for two, and for a schema that is not JSON."""
        schema = self.json_schema
        given = [
            guide
            for guide in (
                None
                if schema is None
                else Guide("json_schema", schema if isinstance(schema, str) else _as_json(schema)),
                None if self.regex is None else Guide("regex", self.regex),
                None if self.grammar is None else Guide("ebnf_grammar", self.grammar),
            )
            if guide is not None
        ]
        if len(given) > 1:
            raise RequestError(
                "more than one of json_schema, regex and grammar is given", hint="An answer follows one of them."
            )
        return given[0] if given else None

    def beams(self) -> BeamParams | None:
        """The beam search that is asked for."""
        if self.beam_width == 1:
            return None
        return BeamParams(self.beam_width, self.n, self.length_penalty, self.early_stopping)

    def drafts(self, vocabulary: int) -> DraftTokens | None:
        """The draft tokens that are given. Raises RequestError for logits that are not theirs."""
        tokens, logits, threshold = self.draft_input_ids, self.draft_logits, self.draft_acceptance_threshold
        if not tokens:
            if logits is None and not threshold:
                return None
            raise RequestError(
                "draft_input_ids is empty", hint="Give the draft tokens that the logits or the threshold are about."
            )
        return DraftTokens(tuple(tokens), _float32(logits, (len(tokens), vocabulary)), threshold)

    def sampling(self, vocabulary: int) -> EngineSampling:
        """The part that the sampler reads. Raises RequestError for a bias of no token of the vocabulary."""
        return EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            return_log_probs=self.log_probs or self.top_log_probs > 0,
            top_log_probs=self.top_log_probs,
            prompt_log_probs=self.prompt_log_probs,
            embedding_bias=_dense(self.logit_bias, vocabulary),
            top_p_decay=self.top_p_decay,
            top_p_min=self.top_p_min,
            top_p_reset_id=self.top_p_reset_id,
        )


def _dense(logit_bias: Mapping[int, float] | None, vocabulary: int) -> Sequence[float]:
    """A bias for each token of the vocabulary, or none."""
    if not logit_bias:
        return ()
    bias = array("f", bytes(4 * vocabulary))
    for token, value in logit_bias.items():
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"logit_bias has token {token}",
                hint=f"Give ids of the vocabulary, from 0 to {vocabulary - 1}.",
            )
        bias[token] = value
        if bias[token] == inf:
            hint = "Give a number that float32 holds, or minus infinity to rule the token out."
            raise RequestError(f"logit_bias of token {token} is {value:g}", hint=hint)
    return bias


def _float32(logits: Any, shape: tuple[int, int]) -> bytes:
    """The numbers of an array of this shape, or none."""
    if logits is None:
        return b""
    import numpy as np

    try:
        found = np.asarray(logits, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"draft_logits is no array: {first_line(error)}", hint=f"Give numbers {shape}.") from None
    if found.shape != shape:
        raise RequestError(f"draft_logits has the shape {found.shape}", hint=f"Give one of {shape}.")
    return found.tobytes()


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give what JSON has: mappings, lists, text, numbers, true, false and null."
        raise RequestError(f"json_schema is not JSON: {error}", hint=hint) from None


_PARAMS = TypeAdapter(SamplingParams)


def checked(params: object) -> SamplingParams:
    """The options with values of their types. Raises RequestError for others."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{params!r:.60} is no SamplingParams", hint="Give SamplingParams(max_tokens=32).")
    try:
        kept = params.kv_retention
        given = {"kv_retention": asdict(kept)} if isinstance(kept, KvCacheRetention) else {}  # to look into it
        found = _PARAMS.validate_python(vars(params) | given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else "SamplingParams"
        raise RequestError(
            f"{name} is {getattr(params, name, None)!r:.60}", hint=f"{wrong['msg']}: see trtforge.SamplingParams."
        ) from None
    if not all(found.stop):
        raise RequestError("a stop text is empty", hint="Leave it out.")
    if 1 < found.beam_width < found.n:
        raise RequestError(
            f"n is {found.n}, beam_width {found.beam_width}", hint="Ask for at most as many beams as are searched."
        )
    return found


class Prompts:
    """Makes requests of prompts with the tokenizer in an engine's directory."""

    def __init__(self, directory: Path, vocabulary: int, adapters: Sequence[str] = ()) -> None:
        """`directory`: of the tokenizer; `vocabulary`: the model's tokens; `adapters`: names, the first of task id 1.

        Raises ForgeError without tokenizer.json.
        """
        if not (directory / TOKENIZER_FILE).is_file():
            raise ForgeError(
                f"{directory} has no {TOKENIZER_FILE}",
                hint="Convert from a checkpoint directory that has it, then compile again.",
            )
        self.tokenizer: Tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
        self._directory = directory
        self.vocab_size = vocabulary
        self._adapters = tuple(adapters)
        self._end_ids = frozenset(read_special_tokens(directory).end_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        """The request of a prompt, without a name. Raises RequestError."""
        ids, table = self._with_table(prompt)
        return GenerationRequest(
            request_id="",
            prompt=tuple(ids),
            prompt_table=table,
            max_tokens=params.max_tokens,
            sampling=params.sampling(self.vocab_size),
            end_ids=frozenset() if params.ignore_end else self._end_ids,
            bad_words=self._spellings(params.bad),
            guide=params.guide(),
            lora_task_id=None if params.adapter is None else self._task_id(params.adapter),
            priority=params.priority,
            lookahead=None if params.lookahead is None else LookaheadSizes(*params.lookahead),
            beams=params.beams(),
            context_logits=params.context_logits,
            generation_logits=params.generation_logits,
            drafts=params.drafts(self.vocab_size),
            kv_retention=params.kv_retention,
            cache_salt=params.cache_salt,
        )

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, as it is and, if it does not begin with a space itself, after one."""
        texts = [*words, *(f" {word}" for word in words if word and not word[0].isspace())]
        return tuple({tuple(self._encoded(text, special=False)): None for text in texts})

    def _task_id(self, adapter: str) -> int:
        if adapter not in self._adapters:
            known = f"Its adapters: {', '.join(self._adapters)}." if self._adapters else "It was compiled without any."
            raise RequestError(f"{adapter!r:.100} is no adapter of this engine", hint=known)
        return self._adapters.index(adapter) + 1

    def _with_table(self, prompt: Prompt) -> tuple[Sequence[int], PromptTable | None]:
        """Token ids, and the table that some of them are rows of."""
        if isinstance(prompt, Tuned):
            if isinstance(prompt.prompt, Tuned) or (
                isinstance(prompt.prompt, Tokens) and prompt.prompt.prompt_table is not None
            ):
                raise RequestError("a prompt has two prompt tables", hint="Give Tokens with rows of one table.")
            table = prompt_table(prompt.prompt_table)
            return [*range(self.vocab_size, self.vocab_size + table.rows), *self._ids(prompt.prompt)], table
        ids = self._ids(prompt)
        if isinstance(prompt, Tokens) and prompt.prompt_table is not None:
            return ids, prompt_table(prompt.prompt_table, prompt.extra_ids)
        return ids, None

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, Tokens):
            return _token_ids(prompt)
        if isinstance(prompt, Chat):
            return self._encoded(self._rendered(prompt), special=False)
        if not isinstance(prompt, str):
            raise RequestError(
                f"{prompt!r:.60} is no prompt", hint="Give text, Chat or Tokens; generate takes a list of them too."
            )
        return self._encoded(prompt)

    def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. Raises RequestError for lone surrogates, which the tokenizer calls no text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("a text holds half of a surrogate pair", hint="Give text that is Unicode.") from None
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def _rendered(self, chat: Chat) -> str:
        """The prompt of messages, in the sandbox of `transformers`."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        found = read_chat_template(self._directory)
        if found is None:
            raise RequestError("the tokenizer has no chat template", hint="Give the prompt as text.")
        try:
            render: Any = render_jinja_template  # its annotations are not those of what it takes and returns
            rendered, _ = render(
                conversations=[list(chat.messages)],
                tools=list(chat.tools) or None,
                chat_template=(found.tool_template if chat.tools else None) or found.template,
                add_generation_prompt=True,
                **found.special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {first_line(error)}",
                hint="Give messages with role and content, in the order that the model was trained on.",
            ) from None
        return str(rendered[0])


def _token_ids(prompt: Tokens) -> list[int]:
    try:
        ids = [index(each) for each in prompt.ids]
    except TypeError as error:
        raise RequestError(f"the prompt's token ids: {error}", hint="Give whole numbers, in one list.") from None
    if any(not 0 <= each <= _MOST_ID for each in ids):
        raise RequestError("the prompt holds token ids outside of any vocabulary", hint="Give ids of its tokenizer.")
    return ids


def sequences(request: GenerationRequest, count: int, number: int) -> list[GenerationRequest]:
    """The requests of `count` sequences of a prompt, with names of their own in the engine; one of a beam search."""
    first = replace(request, request_id=f"api-{number}")
    sampling = replace(request.sampling, prompt_log_probs=False)
    copy = replace(first, copy_of=first.request_id, context_logits=False, sampling=sampling)
    more = range(1, count if request.beams is None else 1)
    seed = request.sampling.seed or 0
    return [first, *(with_seed(replace(copy, request_id=f"api-{number}.{index}"), seed + index) for index in more)]
