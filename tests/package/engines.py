"""Engine directories for tests: complete to look at, with weights of a hundred bytes; one of the LLM API."""

import json
from pathlib import Path
from typing import Any

from tests.compile.checkpoints import engine as settings
from tests.conftest import DEMO_MODEL
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.core.artifact import produce
from trtforge.core.manifest import Identity
from trtforge.core.parallel import Parallel
from trtforge.formats.engine_target import EngineTarget

H100 = EngineTarget(
    tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.1.0.036", sm="90", gpu="NVIDIA H100 80GB HBM3"
)
MODEL = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "logits_dtype": "float32",
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_size": 32,
    "intermediate_size": 768,
    "hidden_act": "silu",
}
FORGE = {
    "backend": "torch",
    "device": "cpu",
    "compute_dtype": "float32",
    "features": {"kv_reuse": True, "chunked_context": False},
}


def engine_config(tp: int = 1, forge: dict[str, Any] | None = None, version: str = "1.2.1") -> dict[str, Any]:
    """config.json of an engine; `forge` None: TensorRT-LLM's own."""
    mapping = {"world_size": tp, "tp_size": tp, "pp_size": 1}
    config: dict[str, Any] = {
        "version": version,
        "pretrained_config": MODEL | {"mapping": mapping},
        "build_config": {
            "max_batch_size": 64,
            "max_input_len": 512,
            "max_seq_len": 1024,
            "max_num_tokens": 1024,
            "max_beam_width": 1,
            "plugin_config": {"tokens_per_block": 16, "use_paged_context_fmha": True},
        },
    }
    return config | ({"forge": forge} if forge is not None else {})


def write_engine(
    out: Path,
    config: dict[str, Any],
    files: dict[str, bytes] | None = None,
    features: dict[str, Any] | None = None,
    target: EngineTarget | None = None,
) -> Path:
    """An engine artifact with that config.json; `files` None: the rank files that it calls for.

    `features`, `target`: what it was compiled for, and with, where its manifest says so.
    """
    suffix = "safetensors" if "forge" in config else "engine"
    ranks = range(config["pretrained_config"]["mapping"]["world_size"])
    contents = files if files is not None else {f"rank{rank}.{suffix}": b"w" * 100 for rank in ranks}

    def write(directory: Path) -> dict[str, Any]:
        (directory / "config.json").write_text(json.dumps(config))
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        return {}

    said = {"features": features} if features is not None else {}
    versions = target.versions if target is not None else {}
    produce(out, Identity(stage="engine", config={"files": sorted(contents), **said}, versions=versions), write)
    return out


def torch_engine(out: Path, files: dict[str, bytes] | None = None) -> Path:
    """An engine of the embedded runtime."""
    return write_engine(out, engine_config(forge=FORGE), files)


def tensorrt_engine(
    out: Path,
    tp: int = 1,
    version: str = "1.2.1",
    features: dict[str, Any] | None = None,
    max_draft_len: int = 0,
    target: EngineTarget | None = None,
) -> Path:
    """An engine of TensorRT-LLM, built for `features`: with adapters up to rank 64, and weights that may stream.

    `target`: what the build recorded.
    """
    config = engine_config(tp, version=version)
    build = config["build_config"]
    build |= {"max_draft_len": max_draft_len, "lora_config": {"max_lora_rank": 64}, "weight_streaming": bool(features)}
    build["plugin_config"] |= {"lora_plugin": "auto" if features else None}
    return write_engine(out, config, features=features, target=target)


def llmapi_engine(out: Path) -> Path:
    """An engine of the LLM API: the demo model as it is, for two GPUs."""
    config = settings(backend="llmapi", max_batch_size=16, max_seq_len=512, target={"tensorrt_llm": "1.3.0"})
    return compile_engine(config, DEMO_MODEL, out, CompileOptions(parallel=Parallel(tp=2))).path
