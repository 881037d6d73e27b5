"""Every family: back from the ranks to the original tensors, and strict accounting, in layouts that golden lacks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import MIXTURES, TINY
from trtforge.convert.stage import ConvertConfig, convert, layout_of
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.models.checkpoint_config import layout_of_checkpoint
from trtforge.models.checkpoint_plan import CheckpointPlan, checkpoint_plan
from trtforge.models.content import Absorbed, pieces_of
from trtforge.models.family import Family
from trtforge.models.registry import family_of, family_of_checkpoint
from trtforge.models.tensor_origins import origins

LAYOUTS = {
    "tp1": {},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp4": {"tp": 4},
    "tp4_embedding_rows": {"tp": 4, "parallel_embedding": True},
    "tp2_embedding_columns": {"tp": 2, "parallel_embedding": True, "embedding_sharding_dim": 1},
}
EXPERT_LAYOUTS = {"tp2ep2": {"tp": 2, "ep": 2}, "tp4ep2": {"tp": 4, "ep": 2}, "tp4ep4pp2": {"tp": 4, "ep": 4, "pp": 2}}
CASES = [(name, layout, options) for name in TINY for layout, options in LAYOUTS.items()] + [
    (name, layout, options) for name in MIXTURES for layout, options in EXPERT_LAYOUTS.items()
]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, written once by transformers."""
    root = tmp_path_factory.mktemp("hf")

    def saved(name: str) -> Path:
        if not (root / name).exists():
            TINY[name]().save_pretrained(root / name)
        return root / name

    return saved


def planned(source: Path, **options: object) -> tuple[Family, CheckpointPlan]:
    checkpoint = open_checkpoint(source)
    family = family_of_checkpoint(checkpoint)
    layout = layout_of(ConvertConfig(**options), "float32")
    return family, checkpoint_plan(family, family.facts(checkpoint.config), layout)


def restored(out: Path, plan: CheckpointPlan) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors, put together again from the ranks; NaN where no rank has an element."""
    layout = layout_of_checkpoint(read_checkpoint_config(out))
    assert layout is not None
    ranks = [load_file(path) for path in sorted(out.glob("rank*.safetensors"), key=lambda p: int(p.stem[4:]))]
    found: dict[str, torch.Tensor] = {}
    for origin in origins(plan, layout):
        piece = origin.piece
        tensor = found.setdefault(piece.source, torch.full(piece.shape, torch.nan))
        matrix = tensor.T if piece.transposed else tensor.view(piece.shape[0], -1)
        rows = ranks[origin.rank][origin.target.name].reshape(-1, len(origin.cols))
        part = rows[origin.first : origin.first + len(origin.rows)].float()
        part = part - 1 if origin.plus_one else part
        into = matrix[origin.rows.start : origin.rows.stop, origin.cols.start : origin.cols.stop]
        assert bool((into.isnan() | (into == part)).all()), f"ranks disagree about {piece.source}"
        into.copy_(part)
    return found


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that the checkpoint stacks in one tensor, as one matrix each."""
    return {
        (f"{name.rpartition('.')[0]}.{index}.{name.rpartition('.')[2]}.weight" if stacked else name): part
        for name, tensor in tensors.items()
        for stacked in (tensor.dim() == 3 and ".experts." in name,)
        for index, part in enumerate(tensor if stacked else [tensor])
    }


@pytest.mark.parametrize(("name", "layout", "options"), CASES, ids=[f"{name}-{layout}" for name, layout, _ in CASES])
def test_the_ranks_give_the_original_back(
    hf: Callable[[str], Path], tmp_path: Path, name: str, layout: str, options: dict[str, object]
) -> None:
    source = hf(name)
    original = by_expert(load_file(source / "model.safetensors"))
    _, plan = planned(source, dtype="float32", **options)
    out = convert(ConvertConfig(dtype="float32", **options), source, tmp_path / "out").path

    found = restored(out, plan)

    plus_one = {p.source for t in plan.targets if getattr(t.content, "plus_one", False) for p in pieces_of(t.content)}
    skipped = {"model.decoder.embed_positions.weight": 2}  # OPT's first rows belong to no position
    assert set(found) == set(original)
    for key, tensor in original.items():
        first = skipped.get(key, 0)
        if key in plus_one:  # stored as weight + 1, rounded to float32
            assert torch.allclose(found[key], tensor, rtol=0, atol=1.2e-7), key
        else:
            assert torch.equal(found[key][first:], tensor[first:]), key


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite"])
def test_absorbed_query_is_the_product(hf: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """The one tensor without a way back: per head, k_nope^T q_nope, then the rotary rows."""
    source = hf(name)
    original = load_file(source / "model.safetensors")
    _, plan = planned(source, dtype="float32")
    content = next(target.content for target in plan.targets if isinstance(target.content, Absorbed))
    assert (content.nope, content.rope, content.value) == (12, 8, 10)
    out = convert(ConvertConfig(dtype="float32", tp=2), source, tmp_path / "out").path
    query = original[content.query.source].view(4, 20, -1)
    key = original[content.key.source].view(4, 22, 24)
    absorbed = torch.stack([torch.cat((key[h, :12].T @ query[h, :12], query[h, 12:])) for h in range(4)])
    for rank, heads in enumerate((absorbed[:2], absorbed[2:])):
        written = load_file(out / f"rank{rank}.safetensors")["transformer.layers.0.attention.fused_q_proj"]
        assert torch.allclose(written, heads.flatten(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(TINY))
def test_every_tensor_is_accounted_for(hf: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source = hf(name)
    tensors = load_file(source / "model.safetensors")
    victim = sorted(key for key in tensors if ".1." in key and key.endswith("weight"))[-1]
    extra = victim.replace("weight", "stranger")
    changes: dict[str, dict[str, torch.Tensor]] = {
        rf"lacks {victim}": {key: value for key, value in tensors.items() if key != victim},
        rf"unexpected tensors .*: {extra}": tensors | {extra: torch.zeros(3)},
        rf"{victim} has shape \[3, 5\]": tensors | {victim: torch.zeros(3, 5)},
    }
    for message, changed in changes.items():
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        save_file(changed, broken / "model.safetensors")
        (broken / "config.json").write_text((source / "config.json").read_text())
        with pytest.raises(ForgeError, match=message) as caught:
            convert(ConvertConfig(tp=2), broken, tmp_path / "out")
        assert caught.value.hint
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "bloom"])
def test_checkpoints_of_the_bare_model_give_the_same(hf: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Published GPT-2 and Bloom checkpoints leave `transformer.` out, and carry masks that mean nothing."""
    source, bare = hf(name), tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((source / "config.json").read_text())
    tensors = {
        key.removeprefix("transformer."): value for key, value in load_file(source / "model.safetensors").items()
    }
    if name == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, bare / "model.safetensors")
    ours = convert(ConvertConfig(tp=2), bare, tmp_path / "a").path
    theirs = convert(ConvertConfig(tp=2), source, tmp_path / "b").path
    for rank in range(2):
        assert (ours / f"rank{rank}.safetensors").read_bytes() == (theirs / f"rank{rank}.safetensors").read_bytes()


def test_context_parallelism_adds_processes_but_no_files(hf: Callable[[str], Path], tmp_path: Path) -> None:
    out = convert(ConvertConfig(tp=2, cp=2), hf("llama"), tmp_path / "out").path
    assert sorted(path.name for path in out.glob("rank*")) == ["rank0.safetensors", "rank1.safetensors"]
    mapping = read_checkpoint_config(out).mapping
    assert (mapping["world_size"], mapping["tp_size"], mapping["cp_size"]) == (4, 2, 2)


@pytest.mark.parametrize("name", sorted({*MIXTURES, "gpt_neox"} - {"llama4", "gpt_oss", "deepseek_v2_lite"}))
def test_the_names_of_transformers_modules_are_those_of_published_models(
    hf: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Programs that save the state of its modules write experts in stacks, and GPT-NeoX's head; it reads both."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((hf(name) / "config.json").read_bytes())
    state = {key: tensor.contiguous() for key, tensor in TINY[name]().state_dict().items()}
    assert state.keys() != load_file(hf(name) / "model.safetensors").keys()
    save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    made = [
        convert(ConvertConfig(tp=2, ep=2 if name in MIXTURES else 1), source, tmp_path / out).path / "rank1.safetensors"
        for source, out in ((hf(name), "published"), (tmp_path / "hf", "modules"))
    ]
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize("architecture", ["MiniMaxM2ForCausalLM", "KimiK25ForConditionalGeneration"])
def test_architectures_without_engines_get_the_way_out(architecture: str) -> None:
    with pytest.raises(ForgeError, match=f"builds no engines for {architecture}.*llmapi") as caught:
        family_of(architecture)
    assert "compile HF_DIR ENGINE --backend llmapi" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mixtral", {"tp": 3, "ep": 3}, "4 attention heads cannot be split over tp 3"),
        ("llama", {"tp": 2, "ep": 2}, "llama has no experts to split over ep 2"),
        ("mixtral", {"tp": 4, "quant": "fp8"}, "fp8 of experts is not supported|needs a calibration"),
        ("deepseek_v2", {"pp": 3}, "4 layers cannot be split over pp 3"),
        ("gemma", {"tp": 8}, "4 attention heads cannot be split over tp 8"),
    ],
)
def test_illegal_layouts(
    hf: Callable[[str], Path], tmp_path: Path, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ForgeError, match=message):
        convert(ConvertConfig(**options), hf(name), tmp_path / "out")
