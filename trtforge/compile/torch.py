"""The torch backend's engine: weights packed for the device's kernels, with TensorRT-LLM's config schema."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.compile.torch_beside import Beside, files_beside
from trtforge.core.device import UsableDevice, usable_device
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.core.features import OF_THE_LLM_API, DraftFeature, FeaturesConfig
from trtforge.core.recipe import EngineConfig
from trtforge.formats.adapter import adapter_files, adapter_names, resolved_lora
from trtforge.formats.eagle import EAGLE_DIRECTORY
from trtforge.formats.trtllm import CONFIG_FILE, CheckpointConfig, rank_file, read_engine_config
from trtforge.machine.host import Host
from trtforge.machine.processor import Processor, compute_dtype
from trtforge.models.kernels import PACKED_GROUPS
from trtforge.plan.asked_features import beams_with_states
from trtforge.plan.draft_tree_rules import tree_problems
from trtforge.plan.limits import EngineLimits

if TYPE_CHECKING:
    from trtforge.runtime.architecture.spec import DecoderSpec
    from trtforge.runtime.linears.kernels import Kernels


@dataclass(frozen=True)
class TorchPlan:
    """An engine of the embedded runtime.

    `compute_dtype`: dtype of its computations; `draft`: engine of its draft model; `adapters`: directories of LoRA
    adapters, whose names are in `features`; `beside`: files of Medusa heads or of an EAGLE network; `warnings`: in
    addition to those of the limits.
    """

    model: CheckpointConfig
    limits: EngineLimits
    device: UsableDevice
    compute_dtype: ModelDtype
    kernels: "Kernels"
    features: FeaturesConfig
    draft: Path | None = None
    adapters: tuple[Path, ...] = ()
    beside: Beside | None = None
    warnings: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What determines the engine's bytes."""
        return {"backend": "torch", "build_config": self.build_config(), "forge": self.forge()}

    def build_config(self) -> dict[str, Any]:
        """The fields of TensorRT-LLM's BuildConfig that the runtime uses."""
        paged_context = self.features.kv_reuse or self.features.chunked_context
        speculation, lora = self.limits.speculation, self.features.lora
        adapted = {} if lora is None else {"max_lora_rank": lora.max_rank, "lora_target_modules": list(lora.modules)}
        return {
            **self.limits.build_fields,
            "kv_cache_type": "PAGED",
            **({} if speculation is None else {"max_draft_len": speculation.draft_tokens}),
            "gather_context_logits": self.features.context_logits,
            "max_prompt_embedding_table_size": self.features.max_prompt_embedding_table_size,
            **({"lora_config": adapted} if adapted else {}),
            "plugin_config": {
                "dtype": self.model.dtype,
                "gpt_attention_plugin": "auto",
                "remove_input_padding": True,
                "paged_kv_cache": True,
                "tokens_per_block": self.limits.tokens_per_block,
                "context_fmha": True,
                "use_paged_context_fmha": paged_context,
                **({"lora_plugin": "auto"} if adapted else {}),
            },
        }

    def forge(self) -> dict[str, Any]:
        """The `forge` object of config.json."""
        return {
            "backend": "torch",
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "kernels": self.kernels.dumped(),
            "features": {
                "kv_reuse": self.features.kv_reuse,
                "chunked_context": self.features.chunked_context,
                **self.features.model_dump(mode="json", include=set(self.features.beyond_paging)),
            },
        }

    def config_json(self, target: str) -> str:
        """The exact text of the engine's config.json, in the schema of the TensorRT-LLM release `target`."""
        content = {
            "version": target,
            "pretrained_config": self.model.model_dump(mode="json"),
            "build_config": self.build_config(),
            "forge": self.forge(),
        }
        return json.dumps(content, indent=2) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The output of --dry-run."""
        ranks = [{"rank": rank.index, "writes": [rank_file(rank.index)]} for rank in self.model.parallel.ranks]
        return {
            "backend": "torch",
            "build_config": self.build_config(),
            "forge": self.forge(),
            "in_flight_batching": True,
            "longest_prompt": self.limits.longest_prompt,
            "ranks": ranks,
            "warnings": [*self.warnings, *self.limits.warnings],
        }


def torch_plan(model: CheckpointConfig, config: EngineConfig, limits: EngineLimits) -> TorchPlan:
    """The plan for a checkpoint. Raises ForgeError for a feature that the embedded engine does not support."""
    if limits.max_beam_width > 1 and limits.speculation is not None:
        raise ForgeError(
            f"engine.features.{limits.speculation.method} does not support beam search, and max_beam_width is "
            f"{limits.max_beam_width}",
            hint="Use max_beam_width 1, or leave the feature out.",
        )
    if limits.max_beam_width > limits.max_batch_size:
        raise ForgeError(
            f"max_beam_width {limits.max_beam_width} is more than max_batch_size {limits.max_batch_size}: each beam is "
            "a sequence of the batch",
            hint=f"Use max_batch_size {limits.max_beam_width} or more.",
        )
    lacking, draft = config.features.unsupported_by_torch, config.features.draft
    if draft is not None and draft.engine is None:
        raise ForgeError(
            "engine.features.draft: not supported by the torch backend without the draft model's engine",
            hint="Give that with engine.features.draft.engine, or use the tensorrt_llm backend.",
        )
    if lacking:
        own = lacking[0] in ("medusa", "eagle")
        files = f"Give the directory with engine.features.{lacking[0]}.model" if own else ""
        having = "llmapi" if lacking[0] in OF_THE_LLM_API else "tensorrt_llm"
        raise ForgeError(
            f"engine.features.{lacking[0]}: not supported by the torch backend{' without model' if files else ''}",
            hint=f"{files or 'Leave it out'}, or use the {having} backend.",
        )
    from trtforge.runtime.adapters.required import require_adapters
    from trtforge.runtime.architecture.spec import DecoderSpec
    from trtforge.runtime.linears.kernels import DTYPES

    spec, lora = DecoderSpec.of(model, 0), config.features.lora
    if spec.linear is not None and limits.max_beam_width > 1:
        problem = beams_with_states(limits.max_beam_width)
        raise ForgeError(problem.message, hint=problem.fix)
    for problem in tree_problems(config.features, model, states=spec.linear is not None):
        raise ForgeError(problem.message, hint=problem.fix)
    device = usable_device(config.device)
    dtype = compute_dtype(config.compute_dtype, model.dtype, device, Processor.of(Host()))
    adapters = () if lora is None else tuple(map(Path, lora.adapters))
    if lora is not None:
        require_adapters(model, resolved_lora(lora), adapters, DTYPES[dtype])
    return TorchPlan(
        model=model,
        limits=limits,
        device=device,
        compute_dtype=dtype,
        kernels=_kernels(spec, model, config, device, dtype),
        features=_without_paths(config.features),
        draft=None if draft is None else _draft_engine(draft, model),
        adapters=adapters,
        beside=files_beside(config.features, model, limits.max_seq_len),
    )


def _kernels(
    spec: "DecoderSpec", model: CheckpointConfig, config: EngineConfig, device: UsableDevice, dtype: ModelDtype
) -> "Kernels":
    """The fastest kernels for the request. Raises ForgeError if there are none."""
    from trtforge.runtime.linears.kernels import choose_kernels

    kernels = choose_kernels(
        spec.algorithm,
        spec.group_size,
        device,
        dtype,
        mixed=spec.layer_formats is not None,
        checkpoint=model.dtype,
        int8_activations=config.int8_activations,
    )
    if config.int8_activations:
        _require_rounded(kernels.quantized, spec.algorithm, device)
    return kernels


def _require_rounded(kernel: str, algorithm: str, device: UsableDevice) -> None:
    """Raise ForgeError unless the kernel of the engine's layers rounds their activations to 8 bits."""
    if kernel == "int4_coded_cpu":
        return
    hint = "Leave it out."
    if algorithm not in ("int4_awq", "int4_wo"):
        raise ForgeError(
            f"engine.int8_activations applies only to INT4 weights (int4_awq, int4_wo), not to {algorithm}", hint=hint
        )
    if device != "cpu":
        raise ForgeError(f"engine.int8_activations applies only to engines on the CPU, not on {device}", hint=hint)
    raise ForgeError(
        "engine.int8_activations: needs a C++ compiler, computations in bfloat16 or float32, and groups of "
        f"{', '.join(map(str, PACKED_GROUPS))} weights",
        hint="Run `trtforge doctor`, or leave it out.",
    )


def _without_paths(features: FeaturesConfig) -> FeaturesConfig:
    draft, lora, medusa, eagle, eagle3 = (
        features.draft,
        features.lora,
        features.medusa,
        features.eagle,
        features.eagle3,
    )
    if draft is not None:
        draft = draft.model_copy(update={"model": None, "engine": None})
    if medusa is not None:
        medusa = medusa.model_copy(update={"model": None})
    if eagle is not None:
        eagle = eagle.model_copy(update={"model": EAGLE_DIRECTORY})
    if eagle3 is not None:
        eagle3 = eagle3.model_copy(update={"model": EAGLE_DIRECTORY})
    if lora is not None:
        lora = resolved_lora(lora).model_copy(update={"adapters": adapter_names(lora.adapters)})
    found = {"draft": draft, "lora": lora, "medusa": medusa, "eagle": eagle, "eagle3": eagle3}
    return features.model_copy(update=found)


def _draft_engine(draft: DraftFeature, model: CheckpointConfig) -> Path:
    """The engine of the draft model. Raises ForgeError if it cannot draft for `model`."""
    directory = Path(draft.engine or "")
    if not (directory / CONFIG_FILE).is_file():
        raise ForgeError(
            f"engine.features.draft.engine: {directory} is not an engine",
            hint="Give a directory that `trtforge compile CHECKPOINT ENGINE --backend torch` wrote.",
        )
    config, values = read_engine_config(directory)
    if "forge" not in values or "draft" in values["forge"].get("features", {}):
        raise ForgeError(
            f"engine.features.draft.engine: {directory} is not a torch engine, or has a draft model",
            hint="Compile the draft model's checkpoint with `--backend torch`.",
        )
    if config.vocab_size != model.vocab_size:
        raise ForgeError(
            f"engine.features.draft.engine: its vocabulary has {config.vocab_size} tokens, the model's "
            f"{model.vocab_size}",
            hint="Draft with a smaller model of the same family.",
        )
    from trtforge.runtime.architecture.spec import DecoderSpec
    from trtforge.runtime.drafters import require_draft_model

    require_draft_model(keeps_states=DecoderSpec.of(config, 0).linear is not None)
    return directory


def copy_adapters(plan: TorchPlan, out: Path) -> None:
    """Copy the adapters into the engine."""
    for place, path in adapter_files(plan.adapters):
        (out / place).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / place / path.name)


def build_rank(plan: TorchPlan, checkpoint: Path, index: int, target: Path) -> None:
    """Pack one rank file of a checkpoint for the engine."""
    from trtforge.models.torch_tensors import write_tensors
    from trtforge.runtime.linears.kernels import DTYPES
    from trtforge.runtime.linears.packing import pack_rank
    from trtforge.runtime.linears.weights import Weights

    weights = Weights.open(checkpoint, index)
    write_tensors(target, pack_rank(plan.model, index, weights, plan.kernels, DTYPES[plan.compute_dtype]))
