"""Guides of answers that may call strict functions, for engines whose servers have trtforge."""

import json
from typing import Any

import numpy as np
from chat_template import Chat, ChatTemplate
from input_names import GUIDE, GUIDE_TYPE
from numpy.typing import NDArray
from responder import RequestFailed
from tokenizers import Tokenizer

from trtforge.core.strict_calls import PROBE, StrictCalls
from trtforge.engine_process.requests import LONGEST_GUIDE


class StrictGuides:
    """The guides of one model's answers."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        try:
            shown = template.chat(json.dumps(PROBE)).prompt
        except RequestFailed:
            shown = ""
        self._calls = StrictCalls(template.tool_template, shown, tokenizer)

    def inputs(self, chat: Chat) -> dict[str, NDArray[Any]]:
        """The engine's inputs of a guide; none if the chat needs none. Raises RequestFailed if it is too long."""
        guide = self._calls.guide(chat.tools, chat.prompt, continues=chat.continues)
        if guide is None:
            return {}
        if len(guide) > LONGEST_GUIDE:
            raise RequestFailed(
                f"messages: the schemas of strict functions make a guide of {len(guide)} characters; at most "
                f"{LONGEST_GUIDE} are allowed"
            )
        texts = {GUIDE_TYPE: "structural_tag", GUIDE: guide}
        return {name: np.array([[text.encode()]], dtype=np.object_) for name, text in texts.items()}
