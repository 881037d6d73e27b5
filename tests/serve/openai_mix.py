"""A mix of requests to OpenAI's API over the demo model, and what their answers say."""

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.gateway.strict import (
    chat_chunks,
    chat_of,
    completion_chunks,
    completion_of,
    response_events,
    response_of,
)
from tests.patience import PATIENCE
from trtforge.runtime.generate import Generation

REQUESTS = 200


def prompts(count: int) -> list[str]:
    """Texts of 5 to 200 characters."""
    text = (DEMO_MODEL / "heldout.txt").read_text().replace("\f", " ")
    return [text[number * 500 :][: 5 + number * 37 % 200] for number in range(count)]


def chat_prompt(messages: Sequence[ChatCompletionMessageParam]) -> list[int]:
    """The token ids that transformers makes of messages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], answer: Generation) -> str:
    """Decoded with the prompt: a tokenizer may put the space between words into either token."""
    return str(tokenizer.decode([*prompt, *answer.tokens])[len(tokenizer.decode(list(prompt))) :])


@dataclass(frozen=True)
class Case:
    """One request of the mix, and its prompt's token ids."""

    path: str
    body: dict[str, object]
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool


def cases(tokenizer: Tokenizer) -> list[Case]:
    """Chats, responses, completions of text and of token ids, every other one streamed."""
    found = []
    for number, text in enumerate(prompts(REQUESTS)):
        tokens, stream = 1 + number % 40, number % 2 == 0
        common = {"model": "ensemble", "temperature": 0, "stream": stream}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        if number % 3:
            ids, path = tokenizer.encode(text).ids, "completions"
            more = {"prompt": text if number % 3 == 1 else ids, "max_tokens": tokens, **usage}
        elif number // 3 % 4 in (1, 2):
            ids, path, more = chat_prompt(messages), "responses", {"input": text, "max_output_tokens": tokens}
        else:
            ids, path = chat_prompt(messages), "chat/completions"
            more = {"messages": messages, "max_tokens": tokens, **usage}
        found.append(Case(path, {**common, **more}, tuple(ids), tokens, stream))
    return found


def answered(url: str, case: Case) -> tuple[str, str, int, int]:
    """Text, finish reason and both counts of tokens."""
    response = httpx.post(f"{url}/{case.path}", json=case.body, timeout=PATIENCE)
    match case.path:
        case "completions":
            return _completion(response, case.stream)
        case "responses":
            return _response(response, case.stream)
    return _chat(response, case.stream)


def _completion(response: httpx.Response, stream: bool) -> tuple[str, str, int, int]:
    *pieces, last = completion_chunks(response) if stream else [completion_of(response)] * 2
    assert last.usage is not None
    text = "".join(piece.choices[0].text for piece in pieces)
    return text, pieces[-1].choices[0].finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens


def _chat(response: httpx.Response, stream: bool) -> tuple[str, str, int, int]:
    if stream:
        *chunks, end = chat_chunks(response)
        text, usage = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), end.usage
        reason: str | None = chunks[-1].choices[0].finish_reason
    else:
        chat = chat_of(response)
        text, reason, usage = chat.choices[0].message.content or "", chat.choices[0].finish_reason, chat.usage
    assert usage is not None
    return text, str(reason), usage.prompt_tokens, usage.completion_tokens


def _response(response: httpx.Response, stream: bool) -> tuple[str, str, int, int]:
    if stream:
        *events, end = response_events(response)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert end.type in ("response.completed", "response.incomplete")
        answer = end.response
        assert answer.output_text == text
    else:
        answer = response_of(response)
    assert answer.usage is not None
    reason = {"completed": "stop", "incomplete": "length"}[str(answer.status)]
    return answer.output_text, reason, answer.usage.input_tokens, answer.usage.output_tokens
