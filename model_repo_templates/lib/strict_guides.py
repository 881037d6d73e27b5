"""Guides of answers that may call functions, for engines whose servers have trtforge."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from chat_template import Chat, ChatTemplate
from input_names import GUIDE, GUIDE_TYPE
from input_values import InputValues
from numpy.typing import NDArray
from responder import RequestFailed
from tokenizers import Tokenizer

from trtforge.core.strict_calls import PROBE, PROBE_PROMPT, StrictCalls
from trtforge.engine_process.requests import LONGEST_GUIDE


class StrictGuides:
    """The guides of one model's answers."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        shown, prompt = _rendered(template, PROBE), _rendered(template, PROBE_PROMPT)
        self._calls = StrictCalls(template.tool_template, shown, tokenizer, prompt)

    def inputs(self, chat: Chat, values: InputValues) -> dict[str, NDArray[Any]]:
        """The engine's inputs of a guide; none if the chat needs none, or the request's own is to be followed as it is.

        `values`: the request's. Raises RequestFailed for a guide that is too long.
        """
        said = None
        if GUIDE in values or GUIDE_TYPE in values:
            said = _schema(values) if chat.guide_allows_calls else None
            if said is None:
                return {}
        guide = self._calls.guide(chat.tools, chat.prompt, continues=chat.continues, said=said)
        if guide is None:
            return {}
        if len(guide) > LONGEST_GUIDE:
            raise RequestFailed(
                f"messages: the schemas of functions make a guide of {len(guide)} characters; at most "
                f"{LONGEST_GUIDE} are allowed"
            )
        texts = {GUIDE_TYPE: "structural_tag", GUIDE: guide}
        return {name: np.array([[text.encode()]], dtype=np.object_) for name, text in texts.items()}


def _rendered(template: ChatTemplate, request: Mapping[str, Any]) -> str:
    """What the template makes of a request; "" if it refuses it."""
    try:
        return template.chat(json.dumps(request)).prompt
    except RequestFailed:
        return ""


def _schema(values: InputValues) -> Mapping[str, Any] | None:
    """The JSON schema of the request's guide; None if it is another one, or wrong, which the engine says."""
    kinds, guides = values.texts(GUIDE_TYPE, 1), values.texts(GUIDE, 1)
    if kinds != ["json_schema"] or not guides:
        return None
    try:
        schema = json.loads(guides[0])
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None
