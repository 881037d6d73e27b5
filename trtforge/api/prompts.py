"""Converts prompts and options of the Python API to requests for the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtforge.api.prompt_tables import prompt_table
from trtforge.api.sampling_params import MOST_ID, SamplingParams
from trtforge.core.errors import ForgeError, RequestError, first_line
from trtforge.core.prompt_template import PromptTemplate
from trtforge.core.reasoning import prompted_thought
from trtforge.core.strict_calls import PROBE, StrictCalls, functions_of
from trtforge.engine_process.requests import GenerationRequest, Guide, LookaheadSizes, PromptTable, with_seed
from trtforge.formats.chat_template import ChatTemplate, read_chat_template
from trtforge.formats.special_tokens import read_special_tokens
from trtforge.formats.tokenizer import TOKENIZER_FILE, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Chat:
    """Messages, each a mapping with `role` and `content`; the tokenizer's chat template converts them to a prompt.

    `tools`: functions that the template describes to the model, as in OpenAI's API; calls of `strict` functions conform
    to their schemas if the template's format of calls is known.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def functions(self) -> frozenset[str]:
        """The names of the functions among the tools."""
        return frozenset(name for name, _ in functions_of(self.tools))


@dataclass(frozen=True)
class Tokens:
    """A prompt of token ids. Those from the engine's `vocab_size` on are rows of `prompt_table` (rows, hidden size).

    A table is a tensor or array; the engine must be compiled with `max_prompt_embedding_table_size`. `extra_ids`: one
    per token; rows with different ids do not share KV blocks.
    """

    ids: Sequence[int]
    prompt_table: object = None
    extra_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Tuned:
    """A text or messages, preceded by all rows of `prompt_table` (rows, hidden size), as in prompt tuning."""

    prompt: str | Chat | Tokens
    prompt_table: object


Prompt = str | Chat | Tokens | Tuned


_END = 16
"""Tokens with which a prompt ends that may write the opening tag of reasoning and the white space after it."""
_BEFORE = ("\n", "a")
"""Beginnings of texts; a tokenizer may join one of them with a word to one token."""


class Prompts:
    """Creates requests from prompts with the tokenizer in an engine's directory."""

    def __init__(self, directory: Path, vocabulary: int, adapters: Sequence[str] = ()) -> None:
        """`directory`: of the tokenizer; `vocabulary`: the model's number of tokens; `adapters`: names, in order of
        task ids from 1.

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
        """The request for a prompt, without a name. Raises RequestError."""
        chat = prompt.prompt if isinstance(prompt, Tuned) else prompt
        text, guide = "", params.guide()
        if isinstance(chat, Chat):
            text = self._rendered(chat)
            guide = guide or self._strict_guide(chat, text, params)
        ids, table = self._with_table(prompt, text)
        return GenerationRequest(
            request_id="",
            prompt=tuple(ids),
            prompt_table=table,
            max_tokens=params.max_tokens,
            sampling=params.sampling(self.vocab_size),
            end_ids=params.end_ids(self._end_ids, self.vocab_size),
            bad_words=self._spellings(params.bad),
            guide=guide,
            lora_task_id=None if params.adapter is None else self._task_id(params.adapter),
            priority=params.priority,
            lookahead=None if params.lookahead is None else LookaheadSizes(*params.lookahead),
            beams=params.beams(),
            context_logits=params.context_logits,
            generation_logits=params.generation_logits,
            drafts=params.drafts(self.vocab_size),
            kv_retention=params.kv_retention,
            cache_salt=params.cache_salt,
            logits_processors=params.processors(),
            allotted_time_ms=params.allotted_time_ms,
            context_only=params.context_only,
            context_phase=params.phase(),
        )

    def thought(self, prompt: Sequence[int]) -> str:
        """The opening tag of reasoning with which a chat's prompt ends; "" if it ends otherwise."""
        return prompted_thought(self.tokenizer.decode(list(prompt[-_END:]), skip_special_tokens=False))

    def _strict_guide(self, chat: Chat, text: str, params: SamplingParams) -> Guide | None:
        """The guide for an answer that may call a strict function; None without one. `text`: of the chat."""
        ends = self._end_ids and not params.ignore_end
        if not ends or params.beam_width > 1 or not chat.tools or self._strict_calls is None:
            return None
        tag = self._strict_calls.guide(chat.tools, text, continues=False)
        return None if tag is None else Guide("structural_tag", tag)

    @cached_property
    def _strict_calls(self) -> StrictCalls | None:
        if self._template is None or find_spec("xgrammar") is None:
            return None
        try:
            shown = self._rendered(Chat(PROBE["messages"], PROBE["tools"]))
        except RequestError:
            shown = ""
        return StrictCalls(self._template.tool_template or self._template.template, shown, self.tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return read_chat_template(self._directory)

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it is, within a text and, unless it begins with a space, with a leading space.

        Tokenizers of Llama 2's kind write a space before each text; within a text a word has none.
        """
        texts = [*words, *(f" {word}" for word in words if word and not word[0].isspace())]
        found = [self._encoded(text, special=False) for text in texts]
        for before in _BEFORE:
            start = self._encoded(before, special=False)
            longer = [self._encoded(before + word, special=False) for word in words]
            found += [ids[len(start) :] for ids in longer if len(ids) > len(start) and ids[: len(start)] == start]
        return tuple({tuple(ids): None for ids in found})

    def _task_id(self, adapter: str) -> int:
        if adapter not in self._adapters:
            known = f"Its adapters: {', '.join(self._adapters)}." if self._adapters else "It was compiled without any."
            raise RequestError(f"{adapter!r:.100} is not an adapter of this engine", hint=known)
        return self._adapters.index(adapter) + 1

    def _with_table(self, prompt: Prompt, text: str) -> tuple[Sequence[int], PromptTable | None]:
        """Token ids, and the table to whose rows some of them refer. `text`: of a chat."""
        if isinstance(prompt, Tuned):
            if isinstance(prompt.prompt, Tuned) or (
                isinstance(prompt.prompt, Tokens) and prompt.prompt.prompt_table is not None
            ):
                raise RequestError("a prompt has two prompt tables", hint="Give Tokens with rows of one table.")
            table = prompt_table(prompt.prompt_table)
            return [*range(self.vocab_size, self.vocab_size + table.rows), *self._ids(prompt.prompt, text)], table
        ids = self._ids(prompt, text)
        if isinstance(prompt, Tokens) and prompt.prompt_table is not None:
            return ids, prompt_table(prompt.prompt_table, prompt.extra_ids)
        return ids, None

    def _ids(self, prompt: Prompt, text: str) -> Sequence[int]:
        if isinstance(prompt, Tokens):
            if prompt.prompt_table is None and np.size(prompt.extra_ids):
                hint = "Give extra_ids and prompt_table to the same Tokens."
                raise RequestError("extra_ids is given without a prompt_table", hint=hint)
            return _token_ids(prompt)
        if isinstance(prompt, Chat):
            return self._encoded(text, special=False)
        if not isinstance(prompt, str):
            raise RequestError(
                f"{prompt!r:.60} is not a prompt", hint="Give text, Chat or Tokens; generate takes a list of them too."
            )
        return self._encoded(prompt)

    def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. Raises RequestError for lone surrogates, which the tokenizer rejects."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("a text contains a lone surrogate", hint="Give text that is Unicode.") from None
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def _rendered(self, chat: Chat) -> str:
        """The prompt of messages, as the served models render it."""
        found = self._template
        if found is None:
            raise RequestError("the tokenizer has no chat template", hint="Give the prompt as text.")
        source = (found.tool_template if chat.tools else None) or found.template
        values = {"tools": list(chat.tools) or None, "documents": None, "add_generation_prompt": True}
        try:
            return _compiled(source).render(chat.messages, {**found.special_tokens, **values})
        except Exception as error:  # the template's expressions raise any
            raise RequestError(
                f"the chat template refuses the messages: {first_line(error)}",
                hint="Give messages with role and content, in the order that the model was trained on.",
            ) from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> PromptTemplate:
    return PromptTemplate(source)


def _token_ids(prompt: Tokens) -> list[int]:
    try:
        ids = [index(each) for each in prompt.ids]
    except TypeError as error:
        raise RequestError(f"the prompt's token ids: {error}", hint="Give whole numbers, in one list.") from None
    if any(not 0 <= each <= MOST_ID for each in ids):
        raise RequestError("the prompt has token ids outside of any vocabulary", hint="Give ids of its tokenizer.")
    return ids


def sequences(request: GenerationRequest, count: int, number: int) -> list[GenerationRequest]:
    """The requests of a prompt's `count` sequences, with unique names in the engine; a beam search is one request."""
    first = replace(request, request_id=f"api-{number}")
    sampling = replace(request.sampling, prompt_log_probs=False)
    copy = replace(first, copy_of=first.request_id, context_logits=False, sampling=sampling)
    more = range(1, count if request.beams is None else 1)
    seed = request.sampling.seed or 0
    return [first, *(with_seed(replace(copy, request_id=f"api-{number}.{index}"), seed + index) for index in more)]
