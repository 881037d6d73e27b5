"""Whether the gateway knows the format of the calls that a chat template shows."""

from collections.abc import Sequence

from trtforge.core.call_forms import BARE, FIRST, JSON_TAGS, LIST, TAGGED
from trtforge.core.call_json import calls_of, value_at
from trtforge.core.harmony import HarmonyText
from trtforge.core.reasoning import begun_thought, prompted_thought


def is_known_call(rendered: str, prompt: str, name: str) -> bool:
    """Whether a rendered conversation ends with an answer that calls this function in a format that is known.

    `prompt`: the conversation up to where the model begins to write. If the rendered one begins otherwise, it is not
    known where the answer begins: then the call may be anywhere, but it needs tags.
    """
    begins = prompt.rstrip().removesuffix(prompted_thought(prompt)).rstrip()
    is_answer = rendered.startswith(begins)
    _, answer = HarmonyText((name,)).push(rendered.removeprefix(begins), last=True)
    answer = _without_reasoning(answer)
    heads = [found for form in TAGGED for found in form.head.finditer(answer)]
    if is_answer:
        heads += [found for bare in (FIRST, BARE, LIST) if (found := bare.match(answer))]
    if any(head["name"] == name for head in heads):
        return True
    starts = [*([0] if is_answer else []), *_ends_of_tags(answer)]
    return any(_calls_at(answer, start, name) for start in starts)


def _without_reasoning(answer: str) -> str:
    """The rest of an answer that begins with reasoning, else all of it; without white space before it."""
    answer = answer.lstrip()
    tags = begun_thought(answer)
    return answer if tags is None else answer.partition(tags[1])[2].lstrip()


def _ends_of_tags(answer: str) -> Sequence[int]:
    """Where JSON of calls may begin."""
    return [at + len(tag) for tag in JSON_TAGS for at in range(len(answer)) if answer.startswith(tag, at)]


def _calls_at(answer: str, start: int, name: str) -> bool:
    """Whether JSON of calls of a function begins here, with its values in any order."""
    try:
        value, _ = value_at(answer[start:].lstrip(), 0)
    except (ValueError, RecursionError):
        return False
    return bool(calls_of((name,), value))
