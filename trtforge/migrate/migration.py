"""Maps settings of an engine and its server to arguments of the LLM API, and reports the result for each."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.sizes import MOST_BYTES
from trtforge.formats.llmapi import LlmArgs, TritonArgs
from trtforge.migrate.prompts import WHY, ignores_max_input_len, longest_prompt
from trtforge.migrate.rules import ENGINE, REPOSITORY, SECTIONS, Attend, Carry, Drop, Rule
from trtforge.migrate.sources import Settings

_TRUE, _FALSE = ("true", "True", "TRUE", "1"), ("false", "False", "FALSE", "0")
"""The boolean values of TensorRT-LLM's C++ backend; others mean its default (src/utils.cc)."""
_POLICIES = {"guaranteed_no_evict": "GUARANTEED_NO_EVICT", "max_utilization": "MAX_UTILIZATION"}


@dataclass(frozen=True)
class Carried:
    """A migrated setting: `key` = `value` is now `to` = `argument`."""

    key: str
    value: Any
    to: str
    argument: Any


@dataclass(frozen=True)
class Left:
    """A setting that was dropped or needs attention, and why."""

    key: str
    value: Any
    why: str


@dataclass
class Migration:
    """The arguments and the result for every setting. `values`: the arguments that are set, by dotted key."""

    args: LlmArgs = field(default_factory=LlmArgs)
    values: dict[str, Any] = field(default_factory=dict)
    carried: list[Carried] = field(default_factory=list)
    dropped: list[Left] = field(default_factory=list)
    attention: list[Left] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report."""
        return {
            "model_yaml": self.args.to_json(),
            "carried": [asdict(entry) for entry in self.carried],
            "dropped": [asdict(entry) for entry in self.dropped],
            "attention": [asdict(entry) for entry in self.attention],
        }


def migrate(settings: Settings) -> Migration:
    """Apply the rules. Raises ForgeError for an invalid value."""
    found = Migration()
    values: dict[str, Any] = {}
    _apply(settings.engine, ENGINE, SECTIONS, values, found)
    if settings.model is not None:
        _apply(settings.model.parameters, REPOSITORY, (), values, found)
        _serving(settings, values, found)
    if ignores_max_input_len(settings.engine):
        _lift_prompts(values, found)
    if settings.missing is not None:
        found.attention.append(
            Left(
                "gpt_model_path",
                settings.missing,
                "the engine does not exist here, so its limits and layout are unknown: give it with --engine",
            )
        )
    found.values = {"triton_config": TritonArgs().model_dump(), **values}
    names = {entry.to: entry.key for entry in found.carried}
    found.args = LlmArgs().with_values(found.values, "migration", lambda key: names.get(key, key))
    return found


def _apply(
    given: Mapping[str, Any],
    rules: tuple[Rule, ...],
    sections: tuple[tuple[str, str], ...],
    values: dict[str, Any],
    found: Migration,
) -> None:
    known = {rule.key: rule for rule in rules}
    rest: dict[str, list[str]] = {}
    for key, value in given.items():
        rule = known.get(key)
        match rule:
            case Carry(when=when) if not when or _is_set(given.get(when)):
                _carry(rule, value, values, found)
            case Drop(why=why):
                found.dropped.append(Left(key, value, why))
            case Attend(why=why, neutral=neutral):
                # 1 == True in Python, but a count of 1 is not a flag.
                same = any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
                if same or not _is_set(value):
                    found.dropped.append(Left(key, value, why))
                else:
                    found.attention.append(Left(key, value, why))
            case _:
                section = next((prefix for prefix, _ in sections if key.startswith(prefix)), None)
                if section is None:
                    found.attention.append(Left(key, value, "unknown setting"))
                else:
                    rest.setdefault(section, []).append(key.removeprefix(section))
    for prefix, why in sections:
        if prefix in rest:
            found.dropped.append(Left(f"{prefix}*", sorted(rest[prefix]), why))


def _carry(rule: Carry, value: Any, values: dict[str, Any], found: Migration) -> None:
    if not _is_set(value) or value == []:
        return
    argument = _argument(rule, value, found)
    if argument is None:
        return
    values[rule.to] = argument
    found.carried.append(Carried(rule.key, value, rule.to, argument))
    if rule.note:
        found.attention.append(Left(rule.key, value, rule.note))


def _argument(rule: Carry, value: Any, found: Migration) -> Any:
    """The value for the LLM API; None if it means the default, or has no equivalent."""
    words = [word for word in value.split(",") if word] if isinstance(value, str) else value
    try:
        match rule.kind:
            case "integer":
                number = _whole(value)
                return number if number > 0 else None  # -1 and 0 mean the default
            case "number":
                return float(value)
            case "integers":
                return [_whole(word) for word in (words if isinstance(words, list) else [words])]
            case "words":
                return [str(word).strip() for word in words]
            case "flag":
                return _flag(rule, value, found)
            case "scheduler":
                return _scheduler(rule, value, found)
            case "fp8":
                return _cache_dtype(rule, value, found)
            case "text":
                return str(value)
            case "present":
                return True
    except (TypeError, ValueError):
        raise ForgeError(
            f"{rule.key} is {value!r}, which is not valid for it",
            hint="Correct it in the engine's config.json or the model's config.pbtxt.",
        ) from None


def _whole(value: Any) -> int:
    """A whole number of 64 bits, or its digits. Raises TypeError or ValueError for anything else."""
    if not isinstance(value, int | str) or isinstance(value, bool) or abs(number := int(value)) > MOST_BYTES:
        raise ValueError(value)
    return number


def _flag(rule: Carry, value: Any, found: Migration) -> bool | None:
    if isinstance(value, bool):
        return value
    if str(value) in (*_TRUE, *_FALSE):
        return str(value) in _TRUE
    found.attention.append(
        Left(rule.key, value, f"Triton does not read it as a boolean and used its default: set {rule.to} if needed")
    )
    return None


def _scheduler(rule: Carry, value: Any, found: Migration) -> str | None:
    policy = _POLICIES.get(str(value))
    if policy is None:
        found.attention.append(
            Left(rule.key, value, f"unknown to Triton, which used guaranteed_no_evict: set {rule.to} if needed")
        )
    return policy


def _cache_dtype(rule: Carry, value: Any, found: Migration) -> str | None:
    if value == "FP8":
        return "fp8"
    why = "the PyTorch backend has no such KV cache"
    if value == "NVFP4":
        why = "trtforge does not offer it in the LLM API"
    found.attention.append(Left(rule.key, value, f"{why}: it will have the model's dtype"))
    return None


def _lift_prompts(values: dict[str, Any], found: Migration) -> None:
    """Raise a max_input_len that the engine ignored (often trtllm-build's default, 1024): repositories enforce it."""
    longest = longest_prompt(values)
    if values.get("max_input_len") == longest:
        return
    given = [entry for entry in found.carried if entry.to == "max_input_len"]
    found.carried = [entry for entry in found.carried if entry not in given]
    if longest is None:
        del values["max_input_len"]
    else:
        values["max_input_len"] = longest
    value = given[0].value if given else None
    found.attention.append(Left("build_config.max_input_len", value, WHY.format(longest or "the model's")))


def _is_set(value: Any) -> bool:
    """False for empty values and unfilled template placeholders, which mean the default."""
    return value is not None and value != "" and not (isinstance(value, str) and value.startswith("${"))


def _serving(settings: Settings, values: dict[str, Any], found: Migration) -> None:
    """Apply the settings in config.pbtxt outside its parameters."""
    model = settings.model
    assert model is not None, "called for repositories"
    values["triton_config.decoupled"] = model.decoupled
    found.carried.append(
        Carried("model_transaction_policy.decoupled", model.decoupled, "triton_config.decoupled", model.decoupled)
    )
    if not model.decoupled:
        found.attention.append(
            Left("model_transaction_policy.decoupled", False, "package with --set serving.streaming=false to keep it")
        )
    if model.max_queue_size and "max_queue_size" not in model.parameters:  # trtforge's own has the engine's limit
        why = f"package with --set serving.max_queue_size={model.max_queue_size} to keep it"
        found.attention.append(Left("dynamic_batching.max_queue_size", model.max_queue_size, why))
    if model.instances > 1:
        why = "one LLM serves all requests: give it more GPUs, or start several servers"
        found.attention.append(Left("instance_group.count", model.instances, why))
    if "max_batch_size" not in values and model.max_batch_size > 0:
        values["max_batch_size"] = model.max_batch_size
        found.carried.append(Carried("max_batch_size", model.max_batch_size, "max_batch_size", model.max_batch_size))
