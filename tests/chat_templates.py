"""Chat templates in the formats of eight families, with the special tokens that they write, for tests of chat.

They use what real templates use: roles renamed, alternation checked, loops with conditions and controls, namespaces,
macros, filters, dates, tools.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import DEMO_MODEL
from trtforge.formats.chat_template import ChatTemplate


@dataclass(frozen=True)
class Family:
    """A family's template. `tokens`: its special tokens; `architecture`: the class of its tiny model."""

    template: str
    tokens: tuple[str, ...]
    architecture: str
    system: bool = True


FAMILIES = {
    "llama3": Family(
        "{% set offset = 0 %}{{- bos_token }}{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "llama",
    ),
    "qwen2": Family(
        "{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif messages[0]['role'] != 'system' %}"
        "{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "qwen2",
    ),
    "qwen3": Family(
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.reasoning_content is defined and loop.last %}"
        "{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
        "{{- message.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "qwen3",
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "gemma",
        system=False,
    ),
    "mistral": Family(
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}"
        "{%- if loop.first and system_message is defined %}{{- ' [INST] ' + system_message + '\\n\\n' }}"
        "{{- message['content'] + ' [/INST]' }}{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}"
        "{%- endif %}"
        "{%- elif message['role'] == 'assistant' %}{%- generation %}{{- ' ' + message['content'] + eos_token }}"
        "{%- endgeneration %}{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}"
        "{%- endif %}{%- endfor %}",
        ("[INST]", "[/INST]"),
        "mistral",
    ),
    "phi3": Family(
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "phi3",
    ),
    "granite": Family(
        "{%- macro turn(role, text) %}<|start_of_role|>{{ role }}<|end_of_role|>{{ text }}<|end_of_text|>\n"
        "{% endmacro %}\n{%- for message in messages if message['role'] != 'ignored' %}\n"
        "{{- turn(message['role'], message['content']) }}\n  {%- endfor %}\n{%- if add_generation_prompt %}\n"
        "{{- '<|start_of_role|>assistant<|end_of_role|>' }}\n{%- endif %}",
        ("<|start_of_role|>", "<|end_of_role|>"),
        "granite",
    ),
    "cohere": Family(
        "{{ bos_token }}{% set found = dict(system='') %}{% for message in messages %}"
        "{% if message['role'] == 'system' %}{% continue %}{% endif %}{% if message['role'] == 'stop' %}{% break %}"
        "{% endif %}{% set content = message['content'] %}{{ '<|START_OF_TURN_TOKEN|><|' + message['role'] | upper }}"
        "{{ '_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}{{ found.system }}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "cohere",
    ),
}

CALLING = Family(
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    '{%- for call in message.tool_calls or [] %}{{- \'<tool_call>\\n{"name": "\' + call.function.name }}'
    "{{- '\", \"arguments\": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "qwen2",
)
"""A family whose template writes calls of functions, as Qwen 2.5 and Hermes do."""

QUESTION = [{"role": "user", "content": " What returns a new list? \n"}]
TALK = [
    {"role": "user", "content": "Return the <b>number</b> of items & «ünïcode»."},
    {"role": "assistant", "content": "It is 'len'."},
    {"role": "user", "content": "Why?"},
]
SYSTEM = [{"role": "system", "content": "Answer briefly."}]


def write_tokenizer(family: Family, directory: Path) -> PreTrainedTokenizerFast:
    """The demo model's tokenizer with a family's special tokens and template, saved to `directory`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(directory)
    return tokenizer  # type: ignore[no-any-return]


def served(chat: ChatTemplate, directory: Path) -> Any:
    """The template as a model loads it."""
    from chat_template import ChatTemplate as Served  # type: ignore[import-not-found]

    (directory / "chat.json").write_text(json.dumps(chat.as_json()))
    return Served.load(directory)


def refusal(template: Any, request: object) -> str:
    """The error for a request."""
    from responder import RequestFailed  # type: ignore[import-not-found]

    with pytest.raises(RequestFailed) as caught:
        template.chat(request if isinstance(request, str) else json.dumps(request))
    return str(caught.value)
