"""docs/extending.md's recipe for a model family, followed: its blocks make a family that converts."""

import json
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from trtforge.cli.options import QUANT_HELP
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import QuantFormat
from trtforge.models import registry
from trtforge.models.formats import FORMATS
from trtforge.models.kernels import REFERENCE
from trtforge.plan.formats import WEIGHT_FORMATS
from trtforge.runtime.linears.stored import _WEIGHTS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
RELEASES = Path(registry.__file__).parent.parent / "formats" / "release_data"
CONFIG = {
    "architectures": ["BirchForCausalLM"],
    "torch_dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def block_after(words: str) -> str:
    """The code block that follows `words` on the page."""
    anywhere = r"\s+".join(map(re.escape, words.split()))
    found = re.search(anywhere + r":\n\n *```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None, words
    return textwrap.dedent(found[1])


@pytest.fixture
def birch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 and 2 of the page: the family's file and its line in the registry."""
    module = ModuleType("trtforge.models.families.birch")
    exec(block_after("New file `trtforge/models/families/birch.py`"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    line = block_after("to `_FAMILY_OF` in `trtforge/models/registry.py`")
    for architecture, family in json.loads("{" + line.strip().removesuffix(",") + "}").items():
        monkeypatch.setitem(registry._FAMILY_OF, architecture, family)


def checkpoint(directory: Path) -> dict[str, NDArray[np.float32]]:
    """A tiny Birch: every tensor that its table asks for, of random numbers."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (61, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (61, 32),
    }
    for layer in range(2):
        rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
        shapes |= {f"model.layers.{layer}.self_attn.{name}.weight": (out, 32) for name, out in rows.items()}
        shapes |= {f"model.layers.{layer}.self_attn.{name}.bias": (out,) for name, out in rows.items()}
        shapes |= {f"model.layers.{layer}.self_attn.out_proj.weight": (32, 32)}
        shapes |= {f"model.layers.{layer}.mlp.{name}.weight": (48, 32) for name in ("gate_proj", "up_proj")}
        shapes |= {f"model.layers.{layer}.mlp.down_proj.weight": (32, 48)}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (32,) for name in norms}
    numbers = np.random.default_rng(0)
    tensors = {name: numbers.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.usefixtures("birch")
def test_the_family_of_the_page_converts(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "birch")
    out = convert(ConvertConfig(dtype="float32", tp=2), tmp_path / "birch", tmp_path / "checkpoint").path

    config = json.loads((out / "config.json").read_text())
    assert (config["architecture"], config["qwen_type"], config["attn_bias"]) == ("Qwen2ForCausalLM", "qwen2", True)
    assert sorted(path.name for path in out.glob("rank*")) == ["rank0.safetensors", "rank1.safetensors"]
    layer = {
        "attention.qkv.weight": (32, 32),  # of a rank: 2 query heads, 1 key head, 1 value head, of 8 each
        "attention.qkv.bias": (32,),
        "attention.dense.weight": (32, 16),
        "mlp.fc.weight": (24, 32),
        "mlp.gate.weight": (24, 32),
        "mlp.proj.weight": (32, 24),
        "input_layernorm.weight": (32,),
        "post_layernorm.weight": (32,),
    }
    expected: dict[str, tuple[int, ...]] = {
        "transformer.vocab_embedding.weight": (61, 32),
        "transformer.ln_f.weight": (32,),
        "lm_head.weight": (31, 32),  # half of the vocabulary, padded to 62
    }
    expected |= {f"transformer.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    for rank in range(2):
        tensors = load_file(out / f"rank{rank}.safetensors")
        assert {name: tensor.shape for name, tensor in tensors.items()} == expected
        columns = slice(16 * rank, 16 * rank + 16)
        dense = source["model.layers.1.self_attn.out_proj.weight"][:, columns]
        assert np.array_equal(tensors["transformer.layers.1.attention.dense.weight"], dense)
        key = source["model.layers.0.self_attn.k_proj.bias"][8 * rank : 8 * rank + 8]
        assert np.array_equal(tensors["transformer.layers.0.attention.qkv.bias"][16:24], key)


def test_without_the_recipe_the_architecture_is_refused() -> None:
    with pytest.raises(ForgeError, match="architecture BirchForCausalLM is not supported"):
        registry.family_of("BirchForCausalLM")


def test_every_format_is_in_every_table() -> None:
    """What the page's section on number formats says to change besides the arithmetic."""
    formats = set(get_args(QuantFormat))
    assert FORMATS.keys() == formats
    assert REFERENCE.keys() == formats
    assert {each.name for each in WEIGHT_FORMATS} == formats
    assert _WEIGHTS.keys() == {name for name, each in FORMATS.items() if each.rounding is not None}
    known = json.loads((RELEASES / "build-config.json").read_text())["quant_algo"]
    assert {each.algorithm for each in FORMATS.values() if each.algorithm} <= {each["quant_algo"] for each in known}
    assert set(re.findall(r"\w+", QUANT_HELP)) >= formats
