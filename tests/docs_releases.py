"""The table of what each TensorRT-LLM release reads and writes, from release_data, with sources and confidence."""

from collections import Counter
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import ServingConfig
from trtforge.formats.attention_windows import pools_of
from trtforge.formats.llmapi import LlmArgs, require_llm_api
from trtforge.formats.releases import CONFIDENCES, Section, read_release_data, release
from trtforge.formats.triton import parameter_problem, parameters
from trtforge.plan.llm_api_arguments import feature_arguments
from trtforge.plan.serving_rules import EMBEDDED_SETTINGS, LLM_ARGUMENTS

_SECTIONS: tuple[Section, ...] = ("build_config", "plugin_config", "lora_config", "mapping", "quantization", "moe")
_PUBLISHED = ("verified", "verified_near", "inferred", "unplaced")


def releases() -> str:
    """A row for each line of releases."""
    rows = [
        "| release | reads `build_config` | keys (seen, listed, inferred) | writes `kv_cache_type` | `config.pbtxt` "
        "parameters (seen, near, inferred) | KV pools by window | sources |",
        "|---|---|---|---|---|---|---|",
    ]
    data = read_release_data("build-config")
    for line in data["versions"]:
        name = str(line["id"])
        cells = (
            name,
            _loading(data, name),
            _numbers(_keys(name)),
            _cache_type(data, name),
            _numbers(_parameters(name)),
            pools_of(release(name)),
            f"{line['status']} ({', '.join(line['sources'])})",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def serving_settings() -> str:
    """The settings of TensorRT-LLM's executor, what else has them, and the releases that do."""
    lines = [str(line["id"]) for line in read_release_data("build-config")["versions"]]
    rows = [
        f"| `serving` key | embedded engine | LLM API | {' | '.join(lines)} |",
        "|---|---|---|" + "---|" * len(lines),
    ]
    names = list(ServingConfig.model_fields)
    for key in names[names.index("max_attention_window_size") :]:
        embedded = "yes" if key in EMBEDDED_SETTINGS else "–"
        argument = f"`{LLM_ARGUMENTS[key]}`" if key in LLM_ARGUMENTS else "–"
        had = ("yes" if parameter_problem(key, release(line)) is None else "–" for line in lines)
        rows.append(f"| `{key}` | {embedded} | {argument} | {' | '.join(had)} |")
    return "\n".join(rows)


LLM_API_ASKED: dict[str, dict[str, Any]] = {
    "draft": {"draft": {"model": "DRAFT", "tokens": 5}},
    "eagle3": {"eagle3": {"model": "NETWORK"}},
    "mtp": {"mtp": True},
    "ngram": {"ngram": True},
    "lora": {"lora": {"max_rank": 16, "modules": ["attn_q"]}},
    "moe.backend": {"moe": {"backend": "CUTLASS"}},
    "moe.backend: TRITON": {"moe": {"backend": "TRITON"}},
    "moe.max_num_tokens": {"moe": {"max_num_tokens": 8192}},
    "attention_dp": {"attention_dp": True},
    "attention_dp.balance": {"attention_dp": {"balance": True}},
    "cuda_graphs": {"cuda_graphs": {"batch_sizes": [1, 2, 4], "padding": True}},
    "cuda_graphs: false": {"cuda_graphs": False},
    "generation_logits": {"generation_logits": True},
}


def llm_api_features() -> str:
    """The arguments that each feature sets for the newest release, and the releases that have it."""
    lines = read_release_data("llmapi")["lines"]
    rows = [f"| feature | arguments | {' | '.join(lines)} |", "|---|---|" + "---|" * len(lines)]
    for name, asked in LLM_API_ASKED.items():
        features = FeaturesConfig.parse(asked, name)
        values = feature_arguments(features, lines[-1])
        shown = [f"`{key}`" for key, value in values.items() if value is not None or key == "cuda_graph_config"]
        had = ("yes" if _llm_api_has(line, features) else "–" for line in lines)
        rows.append(f"| `{name}` | {', '.join(shown)} | {' | '.join(had)} |")
    return "\n".join(rows)


def llm_api_sources() -> str:
    """What was read of each release's LLM API."""
    return "\n".join(f"- {line}: {text}." for line, text in read_release_data("llmapi")["sources"]["lines"].items())


def _llm_api_has(line: str, features: FeaturesConfig) -> bool:
    try:
        require_llm_api(line, LlmArgs().with_values(feature_arguments(features, line), "features"))
    except ForgeError:
        return False
    return True


def sources() -> str:
    """What the abbreviations of the table stand for."""
    used = {name for line in read_release_data("build-config")["versions"] for name in line["sources"]}
    known: dict[str, str] = read_release_data("build-config")["sources"]
    return "\n".join(f"- {name}: {text}." for name, text in known.items() if name in used)


def _loading(data: Any, line: str) -> str:
    rule = next(rule for rule in data["loading_rules"]["build_config_json"] if line in rule["versions"])
    needed = rule["required_keys"]
    return f"{len(needed)} sizes required" if needed else "no key required"


def _cache_type(data: Any, line: str) -> str:
    spelled = data["kv_cache_type"]
    found = spelled["serialised_from_1.2" if line.startswith("1.2") else "serialised_in_config_json"]
    return f"`{found[1]}`"


def _keys(line: str) -> list[int]:
    """Keys of the release's sections, by confidence."""
    counted = Counter(field.confidence for section in _SECTIONS for field in release(line).fields(section).values())
    return [counted[mark] for mark in CONFIDENCES]


def _parameters(line: str) -> list[int]:
    """Parameters of the engine model, by how the release's template is known."""
    wanted = release(line)
    has = {parameter.key for parameter in parameters("tensorrt_llm", wanted)}
    counted: Counter[str] = Counter()
    for entry in read_release_data("triton-model-config")["models"]["tensorrt_llm"]["parameters"]:
        if entry["key"] in has and entry["since"] is not None:
            marks = (mark for mark in _PUBLISHED if _is_listed(line, entry["evidence"].get(mark, ())))
            counted[next(marks, "inferred")] += 1
    return [counted[mark] for mark in _PUBLISHED[:3]]


def _is_listed(line: str, versions: Any) -> bool:
    return any(release(version).line == line for version in versions)


def _numbers(counts: list[int]) -> str:
    return ", ".join(map(str, counts))
