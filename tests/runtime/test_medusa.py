"""Medusa heads beside the network: greedy answers are those without, and heads that are right save steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import KeptRanks, sequence
from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.engine_process.requests import DraftTokens, GenerationRequest, SamplingParams
from trtforge.formats.medusa import MEDUSA_FILE, read_medusa
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.linears.kernels import DTYPES
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.medusa import MedusaDrafter
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.rows import Row

HEADS, HIDDEN, VOCAB = 4, 64, 131
TREE = ((0,), (0, 0), (1,), (1, 0), (1, 1), (2,), (0, 0, 0), (1, 1, 3))
CPU = Placement(torch.device("cpu"), torch.float32)


def write_heads(
    directory: Path, layers: int = 1, sizes: tuple[int, int] = (HIDDEN, VOCAB), **changes: torch.Tensor | None
) -> Path:
    """Random heads for a model of hidden size and vocabulary `sizes`."""
    hidden, vocab = sizes
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    tensors: dict[str, torch.Tensor | None] = {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors |= {
                f"{head}.{layer}.linear.weight": random(hidden, hidden),
                f"{head}.{layer}.linear.bias": random(hidden),
            }
        tensors[f"{head}.{layers}.weight"] = random(vocab, hidden)
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, directory / MEDUSA_FILE)
    return directory


@torch.no_grad()
def right_heads(
    model: LlamaForCausalLM, prompt: list[int], answer: Tokens, directory: Path, ranks: tuple[int, ...] = (0,) * HEADS
) -> Path:
    """Heads that know one answer by heart: least squares, of fewer positions than the hidden size.

    `ranks`: how many other tokens each finds more likely than the right one.
    """
    tokens = torch.tensor([*prompt, *answer])
    hidden = model.model(tokens[None]).last_hidden_state[0]
    tensors = {}
    for head in range(HEADS):
        positions = torch.arange(len(prompt) - 1, len(tokens) - 2 - head)
        right = tokens[positions + 2 + head]
        wanted = torch.nn.functional.one_hot(right, VOCAB).float()
        for other in range(ranks[head]):
            wanted += 2 * torch.nn.functional.one_hot((right + 1 + other) % VOCAB, VOCAB)
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = (
            torch.linalg.lstsq(hidden[positions], wanted, driver="gelsd").solution.t().contiguous()
        )
    directory.mkdir(parents=True)
    save_file(tensors, directory / MEDUSA_FILE)
    return directory


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=["one", "tp2"])
def test_heads_that_are_right_save_steps(
    llama: LlamaForCausalLM, prompts: list[list[int]], expected: list[Tokens], tmp_path: Path, layout: Layout
) -> None:
    engine = write_engine(write_checkpoint(llama, tmp_path / "checkpoint", layout), tmp_path / "engine")
    heads = right_heads(llama, prompts[1], expected[1], tmp_path / "heads")
    source = open_engine(engine)
    ranks = KeptRanks(source, 40)
    drafter = MedusaDrafter(heads, (HIDDEN, VOCAB), MedusaFeature(), CPU, ranks)
    with Engine(source, ranks, EngineOptions(), drafter) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, requests_for(prompts[1:2]))
        found = running.statistics()
    ranks.end()
    # 24 tokens: the prompt's step gives 1, four steps give 5 each, the last one 3.
    assert made.tokens == expected[1]
    assert (found.iterations, found.generated_tokens) == (6, 24)
    assert (made.drafted_tokens, made.accepted_tokens) == (18, 18)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=["one", "tp2"])
def test_a_tree_finds_what_heads_find_less_likely(
    llama: LlamaForCausalLM,
    prompts: list[list[int]],
    expected: list[Tokens],
    tmp_path: Path,
    layout: Layout,
    dtype: str,
) -> None:
    """The second or third candidate of some heads is right: their keys and values lie behind those of others."""
    engine = write_engine(write_checkpoint(llama, tmp_path / "checkpoint", layout), tmp_path / "engine", dtype=dtype)
    source = open_engine(engine)
    plain = generate(engine, requests_for(prompts[1:2]))[0].tokens
    heads = right_heads(llama, prompts[1], plain, tmp_path / "heads", ranks=(1, 0, 2, 1))
    first = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (2,))
    right = ((1, 0), (1, 1), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 0, 2, 0), (1, 0, 2, 1))
    feature = MedusaFeature(choices=(*first, *right))
    ranks = KeptRanks(source, 40)
    drafter = MedusaDrafter(heads, (HIDDEN, VOCAB), feature, replace(CPU, dtype=DTYPES[dtype]), ranks)
    with Engine(source, ranks, EngineOptions(), drafter) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, requests_for(prompts[1:2]))
        found = running.statistics()
    ranks.end()
    assert made.tokens == plain
    if dtype == "float32":  # the prompt's step gives 1 token, four steps 5 each, the last one the 3 that are left
        assert plain == expected[1]
        assert (found.iterations, made.accepted_tokens) == (6, 18)


def test_heads_go_on_after_the_drafts_of_a_client(
    llama: LlamaForCausalLM, checkpoint: Path, prompts: list[list[int]], expected: list[Tokens], tmp_path: Path
) -> None:
    source = open_engine(write_engine(checkpoint, tmp_path / "engine"))
    ranks = KeptRanks(source, 40)
    heads = right_heads(llama, prompts[1], expected[1], tmp_path / "heads")
    drafter = MedusaDrafter(heads, (HIDDEN, VOCAB), MedusaFeature(), CPU, ranks)
    (request,) = requests_for(prompts[1:2])
    drafts = DraftTokens((*expected[1][:8], 1 - min(expected[1][8], 1)))  # the last one is wrong
    with Engine(source, ranks, EngineOptions(), drafter) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, [replace(request, drafts=drafts)])
        found = running.statistics()
    ranks.end()
    # 24 tokens: the prompt's step gives 9, three steps give 5 each.
    assert made.tokens == expected[1]
    assert (found.iterations, made.drafted_tokens, made.accepted_tokens) == (4, 9 + 12, 8 + 12)


def test_answers_are_those_without_heads(
    checkpoint: Path, prompts: list[list[int]], expected: list[Tokens], tmp_path: Path
) -> None:
    """Random heads; chunked prompts, pauses, reused prefixes, several layers."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=24)
    write_heads(engine / "medusa", layers=2)
    sampled = [
        GenerationRequest(str(seed), (3, 4, 5), 12, SamplingParams(top_p=0.9, temperature=0.7, seed=seed))
        for seed in range(4)
    ]
    (asked, without) = [*requests_for(prompts), *sampled], generate(engine, sampled)
    for options in (
        EngineOptions(speculation=MedusaFeature(), chunked_context=True),
        EngineOptions(speculation=MedusaFeature(choices=TREE), chunked_context=True),
        EngineOptions(
            speculation=MedusaFeature(choices=TREE, heads=3),
            chunked_context=True,
            scheduler="max_utilization",
            kv_cache_tokens=160,
            kv_reuse=False,
        ),
        EngineOptions(
            speculation=MedusaFeature(heads=2),
            chunked_context=True,
            scheduler="max_utilization",
            kv_cache_tokens=160,
            kv_reuse=False,
        ),
    ):
        with Engine.load(engine, options) as running:
            made = generate_with(running, asked)
            found = running.statistics()
        assert [each.tokens for each in made] == [*expected, *(each.tokens for each in without)]
        assert found.kv_blocks_used == 0
        assert found.drafted_tokens > 0
        assert (found.paused_requests > 0) == (options.scheduler == "max_utilization")


def test_heads_read_the_hidden_state_that_the_last_token_was_sampled_from(tmp_path: Path) -> None:
    directory = write_heads(tmp_path / "heads")
    tensors = read_medusa(directory, HIDDEN, VOCAB)
    assert (tensors.heads, tensors.layers) == (HEADS, 1)

    class Ranks:
        hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))

        def last_hidden(self) -> torch.Tensor:
            return self.hidden

    drafter = MedusaDrafter(directory, (HIDDEN, VOCAB), MedusaFeature(heads=2), CPU, Ranks())
    row = sequence([5, 6, 7])
    drafter.draft([row])
    assert row.draft.tokens == ()
    computed = Row(row, 2, 1, samples=True, drafts=(8, 9))
    drafter.observe([computed], torch.zeros(3, VOCAB))
    assert (computed.accept(8), computed.accept(1)) == (True, False)
    row.tokens += [8, 1]
    drafter.draft([row])
    values = load_file(directory / MEDUSA_FILE)
    x = Ranks.hidden[1]
    expected = []
    for head in range(2):
        inner = torch.nn.functional.silu(values[f"{head}.0.linear.weight"] @ x + values[f"{head}.0.linear.bias"])
        expected.append(int((values[f"{head}.1.weight"] @ (x + inner)).argmax()))
    assert row.draft.tokens == tuple(expected)
    row.tokens += [1, 2, 3]  # others than those of the step
    drafter.draft([row])
    assert row.draft.tokens == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.0.linear.weight": torch.zeros(8, 8)}, "0.0.linear.weight is (8, 8), the model needs (64, 64)"),
        ({"2.0.linear.bias": None}, "2.0.linear.bias is nothing, the model needs (64,)"),
        ({"1.1.weight": torch.zeros(99, 64)}, "1.1.weight is (99, 64), the model needs (131, 64)"),
        ({"7.0.linear.bias": torch.zeros(64)}, "7.0.linear.bias is not a tensor of the 4 heads"),
        ({"0.1.weight": None}, "no Medusa heads"),
    ],
)
def test_heads_of_another_model_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    directory = write_heads(tmp_path / "heads", **changes)
    with pytest.raises(ForgeError) as caught:
        read_medusa(directory, HIDDEN, VOCAB)
    assert caught.value.message == f"{directory / MEDUSA_FILE}: {message}"


def test_heads_that_are_missing_or_broken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=f"has no {MEDUSA_FILE}"):
        read_medusa(tmp_path, HIDDEN, VOCAB)
    broken = write_heads(tmp_path / "heads", **{"0.1.weight": torch.full((VOCAB, HIDDEN), torch.nan)})
    with pytest.raises(ForgeError, match=r"0\.1\.weight has numbers that are not finite"):
        MedusaDrafter(broken, (HIDDEN, VOCAB), MedusaFeature(), CPU, object())  # type: ignore[arg-type]


def test_copies_of_a_prompt_are_drafted_after_their_own_first_step(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    engine = write_engine(checkpoint, tmp_path / "engine")
    write_heads(engine / "medusa")
    prompt = list(range(7, 30))
    first = GenerationRequest("0", tuple(prompt), 10)
    asked = [first, replace(first, request_id="1", copy_of="0")]
    made = generate(engine, asked, EngineOptions(speculation=MedusaFeature()))
    assert [each.tokens for each in made] == greedy(llama, [prompt, prompt], 10)
    assert all(each.drafted_tokens > 0 for each in made)
