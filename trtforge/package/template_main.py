"""Process that tries a chat template: `python -m trtforge.package.template_main`.

It reads the content of chat.json from standard input, compiles the templates and renders short conversations with
them. It writes a JSON object: `problem`, why a template cannot be compiled, or null, and for requests with tools
`shows_tools` and `shows_unknown_calls`. A template may refuse the conversations. A checkpoint may come from anybody: a
template that takes longer than `MOST_SECONDS` of CPU time ends this process with SIGXCPU, one that takes more than
`MOST_MEMORY` with status NO_MEMORY.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError

from trtforge.core.errors import first_line
from trtforge.core.prompt_template import PromptTemplate
from trtforge.core.shown_calls import is_known_call
from trtforge.core.strict_calls import PROBE, PROBE_PROMPT
from trtforge.machine.own_limits import NO_MEMORY, limit_memory, limit_processor_time, write_no_core_dump

MOST_SECONDS = 10
MOST_MEMORY = 1 << 30
_WITHOUT_TOOLS: Mapping[str, Any] = {**PROBE_PROMPT, "tools": None}
_FUNCTION = PROBE["tools"][0]["function"]["name"]
_ARGUMENTS = PROBE["messages"][1]["tool_calls"][0]["function"]["arguments"].values()


def main() -> int:
    """Try the templates."""
    write_no_core_dump()
    limit_processor_time(MOST_SECONDS)
    limit_memory(MOST_MEMORY)
    values = json.load(sys.stdin)
    found: dict[str, Any] = {"problem": None, "shows_tools": True, "shows_unknown_calls": False}
    try:
        for source in (values["template"], values["tool_template"]):
            if source is None:
                continue
            template = _compiled(source)
            if isinstance(template, str):
                found["problem"] = template
                break
            found |= _shown(template, {**values["special_tokens"], "documents": None})
    except MemoryError:
        return NO_MEMORY
    sys.stdout.write(json.dumps(found))
    return 0


def _compiled(source: str) -> PromptTemplate | str:
    """The template, or why it cannot be compiled. Raises MemoryError."""
    try:
        return PromptTemplate(source)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except SyntaxError as error:  # of the Python code that Jinja makes, which has other lines
        return str(error.msg)
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _shown(template: PromptTemplate, values: Mapping[str, Any]) -> dict[str, bool]:
    """What a template shows of tools, and of a call; if it refuses the conversation, it counts as showing both."""
    _rendered(template, {**values, **_WITHOUT_TOOLS})
    prompt = _rendered(template, {**values, **PROBE_PROMPT})
    called = _rendered(template, {**values, **PROBE})
    shows_call = called is not None and all(value in called for value in _ARGUMENTS)
    return {
        "shows_tools": prompt is None or _FUNCTION in prompt,
        "shows_unknown_calls": shows_call and not is_known_call(called or "", prompt or "", _FUNCTION),
    }


def _rendered(template: PromptTemplate, values: dict[str, Any]) -> str | None:
    """The prompt; None if the template refuses the messages."""
    messages = values.pop("messages")
    try:
        return template.render(messages, values)
    except MemoryError:
        sys.exit(NO_MEMORY)
    except Exception:  # the template's expressions raise any
        return None


if __name__ == "__main__":
    sys.exit(main())
