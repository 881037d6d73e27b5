"""What is run on damaged inputs: the command line, what it needs beside it, and which files are damaged."""

from dataclasses import dataclass

from tests.assault.fuzz_inputs import TENSORRT_ENGINE, TENSORRT_REPOSITORY

NASTY_WORDS = (
    "../x", "/tmp/../x", "a/b", ".", "..", "", " ", "-x", "a" * 5000, "\n", "é", "$(x)", "a b", "9" * 5000, "nan",
    "-1", "0", "inf", "1e999", "[" * 3000, "{a: 1}", "2024-01-01", "2024-13-45", "!!int abc", "&a [*a]", "*a",
    "x: y: z", "~",
    "true", "'", "0x", "190:20:30", "\x07", "hf:x", "builtin:nothing", "1,2", "=", "a=b", "%", "{0}", "1TB",
    "99999999TB",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """One command. `inputs` are copied beside it, `damaged` are globs of the files of which one is damaged.

    `words` has `{}` where a nasty word goes instead of a damaged file. `out`: what it writes.
    """

    words: tuple[str, ...]
    inputs: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    out: str | None = None
    weight: int = 1

    @property
    def name(self) -> str:
        """The command with its first words."""
        return " ".join(self.words[:3])


_SOURCE = ("config.json", "model*.safetensors", "model.safetensors.index.json", "generation_config.json")


def _hf(directory: str) -> tuple[str, ...]:
    return tuple(f"{directory}/{name}" for name in _SOURCE)


_TOKENIZER = ("hf/tokenizer.json", "hf/tokenizer_config.json")
_CALIBRATE = ("--samples", "2", "--seq-len", "16", "--device", "cpu", "--quiet")
_GATE = ("--samples", "2", "--seq-len", "16", "--quiet")
_LLMAPI = ("--backend", "llmapi", "--max-batch-size", "4", "--max-input-len", "32", "--quiet")
_EMBEDDED = ("--backend", "torch", "--device", "cpu", "--max-batch-size", "4", "--max-seq-len", "64", "--quiet")
_PLAN = ("--gpu", "h100-80gb")
_AWQ = ("calibration_int4_awq",)


def _words(text: str, *more: str) -> tuple[str, ...]:
    return (*text.split(), *more)


_FOREIGN = ("foreign/config.json", "foreign/config.json", "foreign/rank0.safetensors")
SCENARIOS = (
    Scenario(_words("convert hf out --quiet"), ("hf",), _hf("hf"), "out", 8),
    Scenario(_words("convert hf out --tp 2 --quiet"), ("hf",), ("hf/config.json",), "out", 3),
    Scenario(_words("convert hf_shards out --quiet"), ("hf_shards",), _hf("hf_shards"), "out", 5),
    Scenario(_words("convert moe out --quiet"), ("moe",), _hf("moe"), "out", 4),
    Scenario(_words("convert hf_awq out --quiet"), ("hf_awq",), ("hf_awq/config.json",), "out", 3),
    Scenario(
        _words("convert hf out --quant fp8 --calibration calibration_fp8 --quiet"),
        ("hf", "calibration_fp8"), ("calibration_fp8/*",), "out", 5,
    ),
    Scenario(
        _words("convert hf out --quant int4_awq --calibration calibration_int4_awq --quiet"),
        ("hf", *_AWQ), ("calibration_int4_awq/*",), "out", 4,
    ),
    Scenario(
        _words("calibrate hf out --quant fp8 --data prompts.jsonl", *_CALIBRATE),
        ("hf", "prompts.jsonl"), (*_hf("hf"), *_TOKENIZER, "prompts.jsonl", "prompts.jsonl"), "out", 5,
    ),
    Scenario(
        _words("calibrate hf out --quant fp8 --data prompts.txt", *_CALIBRATE),
        ("hf", "prompts.txt"), ("prompts.txt",), "out",
    ),
    Scenario(
        _words("calibrate hf out --quant fp8 --data ids.safetensors", *_CALIBRATE),
        ("hf", "ids.safetensors"), ("ids.safetensors",), "out", 2,
    ),
    Scenario(
        _words("verify checkpoint --against hf --data ids.safetensors", *_GATE),
        ("checkpoint", "hf", "ids.safetensors"),
        ("checkpoint/*", "checkpoint/config.json", "hf/config.json", "hf/model.safetensors"), None, 4,
    ),
    Scenario(
        _words("verify checkpoint --against hf --data ids.safetensors --gate gate.yaml", *_GATE),
        ("checkpoint", "hf", "ids.safetensors", "gate.yaml"), ("gate.yaml",), None, 2,
    ),
    Scenario(
        _words("compile checkpoint out", *_EMBEDDED),
        ("checkpoint",), ("checkpoint/*", "checkpoint/*/*", "checkpoint/config.json"), "out", 5,
    ),
    Scenario(_words("compile checkpoint_tp2 out", *_EMBEDDED), ("checkpoint_tp2",), ("checkpoint_tp2/*",), "out", 2),
    Scenario(
        _words("compile checkpoint out --backend tensorrt_llm --dry-run"),
        ("checkpoint",), ("checkpoint/config.json", "checkpoint/forge.json"), "out", 3,
    ),
    Scenario(_words("adopt foreign --quiet"), ("foreign",), (*_FOREIGN, "foreign/*/*"), "foreign/forge.json", 5),
    Scenario(_words("compile foreign out", *_EMBEDDED), ("foreign",), _FOREIGN, "out", 4),
    Scenario(
        _words("verify foreign --against hf --data ids.safetensors", *_GATE),
        ("foreign", "hf", "ids.safetensors"), _FOREIGN, None, 3,
    ),
    Scenario(_words("plan foreign --gpu l40s"), ("foreign",), _FOREIGN, None, 3),
    Scenario(_words("compile hf out", *_LLMAPI), ("hf",), (*_hf("hf"), *_TOKENIZER), "out", 3),
    Scenario(_words("package engine out --quiet"), ("engine",), ("engine/*", "engine/*/*"), "out", 5),
    Scenario(_words("package engine out --tokenizer hf --quiet"), ("engine", "hf"), _TOKENIZER, "out", 2),
    Scenario(_words("package llmapi_engine out --quiet"), ("llmapi_engine",), ("llmapi_engine/*",), "out", 4),
    Scenario(
        (*_words("package"), TENSORRT_ENGINE, *_words("out --tokenizer hf --quiet")),
        (TENSORRT_ENGINE, "hf"), (f"{TENSORRT_ENGINE}/*.json",), "out", 3,
    ),
    Scenario(_words("package engine out --quiet --name", "{}"), ("engine",), (), "out", 2),
    Scenario(_words("package engine out --quiet --set", "serving.kv_cache_fraction={}"), ("engine",), (), "out"),
    *(
        Scenario(_words("inspect", name, "--tensors"), (name,), (f"{name}/*",), None, 2)
        for name in ("hf", "hf_shards", "checkpoint", "engine", "repository", "llmapi_engine", "calibration_fp8")
    ),
    Scenario(_words("plan hf", *_PLAN), ("hf",), ("hf/config.json", "hf/config.json", "hf/model.safetensors"), None, 4),
    Scenario(_words("plan moe --alternatives", *_PLAN), ("moe",), ("moe/config.json",), None, 4),
    Scenario(_words("plan recipe.yaml"), ("recipe.yaml", "hf", "prompts.jsonl"), ("recipe.yaml",), None, 3),
    Scenario(
        _words("plan recipe.yaml --set", "engine.features.lora.adapters=[adapter]"),
        ("recipe.yaml", "hf", "prompts.jsonl", "adapter"), ("adapter/adapter_config.json",), None, 2,
    ),
    Scenario(_words("recipes validate recipe.yaml"), ("recipe.yaml",), ("recipe.yaml",), None, 6),
    Scenario(_words("recipes show recipe.yaml --json"), ("recipe.yaml",), ("recipe.yaml",)),
    Scenario(_words("recipes copy recipe.yaml mine.yaml"), ("recipe.yaml",), ("recipe.yaml",), "mine.yaml"),
    Scenario(
        _words("compare build build --html comparison.html"),
        ("build",), ("build/report.json",), "comparison.html", 3,
    ),
    Scenario(_words("doctor --log run.log"), ("run.log",), ("run.log",), None, 6),
    Scenario(_words("doctor --log run.log --json"), ("run.log",), ("run.log",), None, 2),
    Scenario(
        _words("generate engine", "The function", "--max-tokens", "3"), ("engine",), ("engine/*", "engine/*/*"), None, 5
    ),
    Scenario(
        _words("build recipe.yaml --dry-run"),
        ("recipe.yaml", "hf", "prompts.jsonl"), ("recipe.yaml", "hf/config.json"), None, 4,
    ),
    Scenario(
        _words("build recipe.yaml --dry-run --set", "engine.max_seq_len={}"), ("recipe.yaml", "hf", "prompts.jsonl")
    ),
    Scenario(_words("build recipe.yaml --dry-run --set", "name={}"), ("recipe.yaml", "hf", "prompts.jsonl")),
    Scenario(_words("build recipe.yaml --dry-run --set", "{}"), ("recipe.yaml", "hf", "prompts.jsonl")),
    Scenario(
        _words("build recipe.yaml --dry-run --locked"),
        ("recipe.yaml", "hf", "prompts.jsonl", "forge.lock"), ("forge.lock",), None, 3,
    ),
    Scenario(_words("migrate foreign_engine out --quiet"), ("foreign_engine",), ("foreign_engine/*",), "out", 4),
    Scenario(
        _words("migrate foreign_engine out --quiet --checkpoint hf"),
        ("foreign_engine", "hf"), ("foreign_engine/*", "hf/config.json"), "out", 2,
    ),
    Scenario(
        (*_words("migrate"), TENSORRT_REPOSITORY, *_words("out --quiet")),
        (TENSORRT_REPOSITORY,), (f"{TENSORRT_REPOSITORY}/*/config.pbtxt",), "out", 3,
    ),
    *(
        Scenario(_words("serve", name, "--dry-run"), (name,), (f"{name}/forge.json", f"{name}/*/config.pbtxt"), None, 2)
        for name in ("repository", TENSORRT_REPOSITORY, "llmapi_repository")
    ),
)  # fmt: skip
