"""The valid inputs that are damaged: a small model and everything that trtforge makes of it, beside files of users."""

import json
import shutil
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parents[2] / "recipes" / "demo-model"
TENSORRT_ENGINE, TENSORRT_REPOSITORY = "trt_engine", "trt_repository"

RECIPE = """\
name: fuzz
model: {source: hf, revision: main}
quantization:
  format: fp8
  kv_cache: none
  exclude_modules: ["*.0.mlp.down_proj"]
  calibration: {data: prompts.jsonl, samples: 2, sequence_length: 16, batch_size: 2, seed: 3}
parallel: {tp: 1, pp: 1, ep: 1}
engine:
  backend: torch
  device: cpu
  target: {gpu: h100-80gb, tensorrt_llm: 1.2.1}
  max_batch_size: 4
  max_input_len: 32
  max_seq_len: 64
  max_num_tokens: 64
  tokens_per_block: 16
  features: {kv_reuse: true, chunked_context: true}
serving: {streaming: true, kv_cache_fraction: 0.5, max_queue_size: 10}
gate: {perplexity_increase: 0.5, top1_agreement: 0.1, data: prompts.jsonl, samples: 2, sequence_length: 16}
"""
LOCK = """\
version: 1
recipes:
  fuzz:
    model: {source: hf, revision: main, digest: aa}
    data: {calibration: bb, gate: {source: "hf:x/y", commit: cc}}
    engine: {backend: torch, tensorrt_llm: 1.2.1}
    versions: {python: 3.11.2, trtforge: 0.1.0}
"""


def make_inputs(base: Path) -> None:
    """Write all inputs into the directory `base`, which must not exist."""
    base.mkdir(parents=True)
    _write_models(base)
    _write_user_files(base)
    _write_artifacts(base)
    _write_tensorrt(base)


def _write_models(base: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.float16)
    model.save_pretrained(base / "hf")
    model.save_pretrained(base / "hf_shards", max_shard_size="100KB")
    moe = sizes | {"num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**moe)).to(torch.float16).save_pretrained(base / "moe")
    for directory in ("hf", "hf_shards", "moe"):
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(DEMO_MODEL / name, base / directory / name)
    shutil.copytree(base / "hf", base / "hf_awq")
    config = json.loads((base / "hf_awq" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (base / "hf_awq" / "config.json").write_text(json.dumps(config, indent=2))


def _write_user_files(base: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from tests.doctor.excerpts import EXCERPTS
    from tests.pipeline.records import full, written

    written(base / "build", full())
    rows = [{"text": f"The function number {n} returns a new object of the class. " * 3} for n in range(12)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "prompts.txt").write_text("\f".join(row["text"] for row in rows))
    save_file({"input_ids": torch.arange(4 * 16).reshape(4, 16)}, base / "ids.safetensors")
    (base / "recipe.yaml").write_text(RECIPE)
    (base / "forge.lock").write_text(LOCK)
    (base / "gate.yaml").write_text("gate: {perplexity_increase: 0.9, top1_agreement: 0.0, kl_mean: 5.0}\n")
    (base / "run.log").write_text("".join(excerpt.text() for excerpt in EXCERPTS[:6]))
    (base / "adapter").mkdir()
    adapter = {"r": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 4}, "bias": "none"}
    (base / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))


def _write_artifacts(base: Path) -> None:
    from trtforge.calibrate.stage import CalibrateConfig, calibrate
    from trtforge.compile.stage import CompileOptions, compile_engine
    from trtforge.convert.stage import ConvertConfig, convert
    from trtforge.core.progress import for_this_terminal
    from trtforge.core.recipe import EngineConfig
    from trtforge.package.config import PackageConfig
    from trtforge.package.stage import package

    quiet, hf = for_this_terminal(quiet=True), base / "hf"
    data = {"data": str(base / "prompts.jsonl"), "samples": 2, "sequence_length": 16}
    for name in ("fp8", "int4_awq"):
        config = CalibrateConfig.parse({"format": name, "group_size": 64, "data": data}, "fuzz")
        calibrate(config, hf, base / f"calibration_{name}", progress=quiet)
    convert(ConvertConfig(quant="fp8"), hf, base / "checkpoint", calibration=base / "calibration_fp8", progress=quiet)
    convert(ConvertConfig(tp=2), hf, base / "checkpoint_tp2", progress=quiet)
    shutil.copytree(base / "checkpoint", base / "foreign")
    (base / "foreign" / "forge.json").unlink()
    limits = {"max_batch_size": 4, "max_seq_len": 64, "max_num_tokens": 64, "tokens_per_block": 16}
    engine = EngineConfig.parse({"backend": "torch", "device": "cpu"} | limits, "fuzz")
    compile_engine(engine, base / "checkpoint", base / "engine", CompileOptions(), progress=quiet)
    llmapi = EngineConfig.parse({"backend": "llmapi", "max_batch_size": 4, "max_input_len": 32}, "fuzz")
    compile_engine(llmapi, hf, base / "llmapi_engine", CompileOptions(), progress=quiet)
    package(PackageConfig(), base / "engine", None, base / "repository")
    package(PackageConfig(), base / "llmapi_engine", None, base / "llmapi_repository")


def _write_tensorrt(base: Path) -> None:
    """An engine of TensorRT-LLM to look at, and the repositories that serve it: ours and anybody's."""
    from tests.package.engines import H100, engine_config, write_engine
    from trtforge.package.config import PackageConfig
    from trtforge.package.stage import package

    engine = write_engine(base / TENSORRT_ENGINE, engine_config(), target=H100)
    package(PackageConfig(), engine, base / "hf", base / TENSORRT_REPOSITORY)
    foreign = base / "foreign_engine"
    foreign.mkdir()
    shutil.copy(engine / "config.json", foreign / "config.json")
