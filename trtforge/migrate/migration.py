"""Settings of an engine and its server as arguments of the LLM API, with an account of every one of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.llmapi import LlmArgs, TritonArgs
from trtforge.migrate.prompts import WHY, ignores_max_input_len, longest_prompt
from trtforge.migrate.rules import ENGINE, REPOSITORY, SECTIONS, Attend, Carry, Drop, Rule
from trtforge.migrate.sources import Settings

_TRUE, _FALSE = ("true", "True", "TRUE", "1"), ("false", "False", "FALSE", "0")
"""All that TensorRT-LLM's C++ backend takes for a boolean; anything else is its default (src/utils.cc)."""
_POLICIES = {"guaranteed_no_evict": "GUARANTEED_NO_EVICT", "max_utilization": "MAX_UTILIZATION"}


@dataclass(frozen=True)
class Carried:
    """A setting that lives on: `value` of `key` is now `argument` of `to`."""

    key: str
    value: Any
    to: str
    argument: Any


@dataclass(frozen=True)
class Left:
    """A setting without a successor, and why; or what somebody must look at."""

    key: str
    value: Any
    why: str


@dataclass
class Migration:
    """The arguments, and what became of every setting. `values`: those that were carried over, by dotted key."""

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
    """Apply the tables. Raises ForgeError for a value that its own setting could not have."""
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
                "the engine is not there: its limits and its layout are unknown; give it with --engine",
            )
        )
    found.values = {"triton_config": TritonArgs().model_dump(), **values}
    found.args = LlmArgs().with_values(found.values, "migration")
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
                # 1 == True, but a count of 1 is no flag.
                same = any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
                if same or not _is_set(value):
                    found.dropped.append(Left(key, value, why))
                else:
                    found.attention.append(Left(key, value, why))
            case _:
                section = next((prefix for prefix, _ in sections if key.startswith(prefix)), None)
                if section is None:
                    found.attention.append(Left(key, value, "the setting is not known"))
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
    """The value as the LLM API has it; None where it means the default there too, or is no value at all."""
    words = [word for word in value.split(",") if word] if isinstance(value, str) else value
    try:
        match rule.kind:
            case "integer":
                number = int(value)
                return number if number > 0 else None  # -1 and 0 stand for defaults
            case "number":
                return float(value)
            case "integers":
                return [int(word) for word in (words if isinstance(words, list) else [words])]
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
            f"{rule.key} is {value!r}, which is no value for it",
            hint="Correct it where it was written.",
        ) from None


def _flag(rule: Carry, value: Any, found: Migration) -> bool | None:
    if isinstance(value, bool):
        return value
    if str(value) in (*_TRUE, *_FALSE):
        return str(value) in _TRUE
    found.attention.append(
        Left(rule.key, value, "Triton does not take it for a boolean and used its default: say what was meant")
    )
    return None


def _scheduler(rule: Carry, value: Any, found: Migration) -> str | None:
    policy = _POLICIES.get(str(value))
    if policy is None:
        found.attention.append(
            Left(rule.key, value, "Triton does not know the policy and used guaranteed_no_evict: say what was meant")
        )
    return policy


def _cache_dtype(rule: Carry, value: Any, found: Migration) -> str | None:
    if value == "FP8":
        return "fp8"
    found.attention.append(
        Left(rule.key, value, "the PyTorch backend has no such KV cache: it will have the model's type")
    )
    return None


def _lift_prompts(values: dict[str, Any], found: Migration) -> None:
    """An ignored max_input_len, often trtllm-build's default of 1024, would be enforced from now on."""
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
    """An empty value and an unfilled placeholder of NVIDIA's templates stand for the default."""
    return value is not None and value != "" and not (isinstance(value, str) and value.startswith("${"))


def _serving(settings: Settings, values: dict[str, Any], found: Migration) -> None:
    """What config.pbtxt says outside its parameters."""
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
    if model.max_queue_size:
        why = f"package with --set serving.max_queue_size={model.max_queue_size} to keep it"
        found.attention.append(Left("dynamic_batching.max_queue_size", model.max_queue_size, why))
    if model.instances > 1:
        why = "one LLM serves all requests: give it more GPUs, or start several servers"
        found.attention.append(Left("instance_group.count", model.instances, why))
    if "max_batch_size" not in values and model.max_batch_size > 0:
        values["max_batch_size"] = model.max_batch_size
        found.carried.append(Carried("max_batch_size", model.max_batch_size, "max_batch_size", model.max_batch_size))
