"""Sliding windows for the LLM API: the windows of a model, and which of them a release's PyTorch backend applies."""

from dataclasses import dataclass

from trtforge.core.parallel import Parallel
from trtforge.formats.attention_windows import attention_windows, executor_windows
from trtforge.formats.hf import HfConfig
from trtforge.formats.llmapi import applies_windows
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.registry import architectures, family_of


@dataclass(frozen=True)
class Windows:
    """The windows of a model's layers, in tokens (None: all tokens), and its Hugging Face architecture."""

    architecture: str
    layers: tuple[int | None, ...] = ()

    @classmethod
    def of_checkpoint(cls, model: CheckpointConfig) -> "Windows":
        """The windows of a TensorRT-LLM checkpoint, whose architectures with windows have Hugging Face's names."""
        return cls(model.architecture, attention_windows(model))

    @classmethod
    def of_hugging_face(cls, config: HfConfig, text: HfConfig) -> "Windows":
        """The windows of a Hugging Face checkpoint; `text`: the configuration of its language model."""
        architecture = config.architecture
        if not text.values.get("sliding_window"):
            return cls(architecture)
        if architecture not in architectures():
            return cls(architecture, _listed(text))
        family = family_of(architecture)
        layout = Layout(Parallel(), "float32")
        model = checkpoint_config(family, family.facts(config), architecture, layout)
        return cls(architecture, attention_windows(model))

    def applied(self, version: str, max_seq_len: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """`kv_cache_config.max_attention_window` for a release, and warnings.

        The KV cache frees blocks behind these windows, so they are written only if the network attends to nothing
        behind them.
        """
        windows = executor_windows(self.layers, max_seq_len)
        if not windows:
            return None, ()
        if applies_windows(self.architecture, version):
            return windows, ()
        smallest = min(windows)
        return None, (
            f"the PyTorch backend of TensorRT-LLM {version} does not apply the sliding window of {self.architecture}: "
            f"beyond {smallest} tokens answers differ from the model's. Use max_seq_len {smallest}, or a later target.",
        )


def _listed(text: HfConfig) -> tuple[int | None, ...]:
    """The windows of all layers, from `sliding_window` and `layer_types`.

    Without `layer_types`, from the period of layers that attend to all tokens (`sliding_window_pattern`, as in
    published Cohere 2); without both, all layers have the window.
    """
    window, count = text.values.get("sliding_window"), text.values.get("num_hidden_layers")
    usable = isinstance(window, int) and not isinstance(window, bool) and window > 0
    if not usable or not isinstance(count, int) or not text.flag("use_sliding_window", True):
        return ()
    if kinds := text.items("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    given = text.values.get("sliding_window_pattern")
    period = given if isinstance(given, int) and given > 0 else count + 1
    return tuple(window if (layer + 1) % period else None for layer in range(count))
