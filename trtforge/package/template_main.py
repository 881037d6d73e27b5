"""Process that tries a chat template: `python -m trtforge.package.template_main`.

It reads the content of chat.json from standard input, compiles the templates and renders short conversations with
them. It writes why a template cannot be compiled, or nothing; a template may refuse the conversations. A checkpoint may
come from anybody: a template that takes longer than `MOST_SECONDS` of CPU time ends this process with SIGXCPU, one that
takes more than `MOST_MEMORY` with status NO_MEMORY.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jinja2 import TemplateSyntaxError

from trtforge.core.errors import first_line
from trtforge.core.prompt_template import PromptTemplate
from trtforge.core.strict_calls import PROBE
from trtforge.machine.own_limits import NO_MEMORY, limit_memory, limit_processor_time, write_no_core_dump

MOST_SECONDS = 10
MOST_MEMORY = 1 << 30
_CONVERSATIONS: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hi"}], "tools": None, "add_generation_prompt": True},
    PROBE,
)


def main() -> int:
    """Try the templates."""
    write_no_core_dump()
    limit_processor_time(MOST_SECONDS)
    limit_memory(MOST_MEMORY)
    values = json.load(sys.stdin)
    try:
        for source in (values["template"], values["tool_template"]):
            problem = _problem(source, values["special_tokens"]) if source else None
            if problem is not None:
                sys.stdout.buffer.write(problem.encode("utf-8", "backslashreplace"))
                break
    except MemoryError:
        return NO_MEMORY
    return 0


def _problem(source: str, special_tokens: Mapping[str, Any]) -> str | None:
    """Why a template cannot be compiled; None if it can. Raises MemoryError."""
    try:
        template = PromptTemplate(source)
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
    for conversation in _CONVERSATIONS:
        with suppress(Exception):
            _render(template, {**special_tokens, "documents": None, **conversation})
    return None


def _render(template: PromptTemplate, values: dict[str, Any]) -> None:
    messages = values.pop("messages")
    try:
        template.render(messages, values)
    except MemoryError:
        sys.exit(NO_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
