"""EAGLE networks beside the model: they draft what transformers' modules do, and answers are those without them."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.eagle_networks import HIDDEN, VOCAB, Reference, right_network, write_network
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import KeptRanks
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.dtypes import ModelDtype
from trtforge.core.features import EagleFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.engine_process.requests import DraftTokens, GenerationRequest, SamplingParams
from trtforge.formats.eagle import EagleKind
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.decoder.eagle import Network
from trtforge.runtime.drafters import with_drafter
from trtforge.runtime.drafting import Speculation
from trtforge.runtime.eagle import EagleDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.ranks import single_tokens
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.draft_trees import TreeShape
from trtforge.runtime.scheduling.sequence import Draft, Sequence

FEATURES: dict[EagleKind, Speculation] = {
    "eagle": EagleFeature(model="eagle", draft_tokens=4),
    "eagle3": Eagle3Feature(model="eagle", draft_tokens=4),
}

CHOICES = ((0,), (0, 0), (0, 1), (1,), (1, 0), (2,), (0, 0, 0), (0, 0, 2), (1, 0, 0), (1, 0, 0, 1))


class Drafts:
    """The tokens of each sequence and what was drafted after them. With `answers` of prompts, other tokens are verified
    instead: right ones, up to a number that depends on the position."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tokens, Tokens]] = []
        self.answers: dict[Tokens, Tokens] = {}

    def note(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.seen.append((tuple(sequence.tokens), sequence.draft.tokens))
            made, answer = sequence.generated, self.answers.get(sequence.request.prompt)
            if answer is not None:
                right, rest = answer[made : made + made % 4], answer[made + made % 4 : made + 3]
                sequence.draft = Draft((*right, *((token + 1) % VOCAB for token in rest)))

    def after(self, prompt: list[int]) -> list[tuple[Tokens, Tokens]]:
        return [each for each in self.seen if each[0][: len(prompt)] == tuple(prompt)]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    found, own = Drafts(), EagleDrafter.draft

    def noted(self: EagleDrafter, sequences: list[Sequence]) -> None:
        own(self, sequences)
        found.note(sequences)

    monkeypatch.setattr(EagleDrafter, "draft", noted)
    return found


def compare(drafts: Drafts, reference: Reference, prompts: list[list[int]], most: int) -> None:
    """The drafts after the first `most` steps of each prompt are those of the reference."""
    for prompt in prompts:
        own = drafts.after(prompt)[:most]
        assert own
        assert own == [(tokens, reference.draft(list(tokens), len(found))) for tokens, found in own]


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("chunked", [False, True])
def test_drafts_are_those_of_the_network(
    llama: LlamaForCausalLM,
    checkpoint: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    drafts: Drafts,
    tmp_path: Path,
    kind: EagleKind,
    chunked: bool,
) -> None:
    """Several sequences at once, some of their drafts accepted, prompts in chunks, chains that reach beyond the blocks
    of their sequence."""
    limits = {"tokens_per_block": 4, "max_num_tokens": 48} if chunked else {}
    engine = write_engine(checkpoint, tmp_path / "engine", **limits)
    write_network(engine / "eagle", kind)
    drafts.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    options = EngineOptions(speculation=FEATURES[kind], chunked_context=chunked, kv_reuse=False)
    with Engine.load(engine, options) as running:
        made = generate_with(running, requests_for(prompts))
        found = running.statistics()
    assert [each.tokens for each in made] == expected
    assert 0 < found.accepted_tokens < found.drafted_tokens
    compare(drafts, Reference(llama, engine / "eagle", kind), prompts, most=9)
    assert max(len(each) for _, each in drafts.seen) == 4


def test_trees_are_those_of_the_network(
    llama: LlamaForCausalLM, checkpoint: Path, prompts: list[list[int]], expected: list[Tokens], tmp_path: Path
) -> None:
    """Several sequences at once, in small blocks, with answers as without them, and again after reused prefixes."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=96)
    write_network(engine / "eagle", "eagle")
    seen: list[tuple[Tokens, Draft]] = []
    feature, own = EagleFeature(model="eagle", choices=CHOICES), EagleDrafter.draft

    def noted(self: EagleDrafter, sequences: list[Sequence]) -> None:
        own(self, sequences)
        seen.extend((tuple(each.tokens), each.draft) for each in sequences)

    options = EngineOptions(speculation=feature, chunked_context=True)
    with mock.patch.object(EagleDrafter, "draft", noted), Engine.load(engine, options) as running:
        made = generate_with(running, requests_for(prompts))
        again = generate_with(running, requests_for(prompts))
        found = running.statistics()
    assert [each.tokens for each in made] == [each.tokens for each in again] == expected
    assert sum(each.reused_blocks for each in again) > 0
    assert found.kv_blocks_used == 0
    reference, shape = Reference(llama, engine / "eagle", "eagle"), TreeShape.of(CHOICES)
    whole = [(tokens, draft) for tokens, draft in seen if len(draft.tokens) == len(CHOICES)]
    assert len(whole) > 40
    for tokens, draft in whole[:40]:
        assert draft.parents == shape.parents
        assert draft.tokens == reference.tree(list(tokens), tuple(sorted(CHOICES)))


def test_a_tree_finds_what_a_network_finds_less_likely(tmp_path: Path) -> None:
    """The second candidate is right everywhere: the path is moved to where a chain would be, and drafts go on."""
    model = right_network(tmp_path / "network", "eagle")
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint")
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    answer = greedy(model, [[5, 9, 2]], 24)[0]
    (tmp_path / "network").rename(engine / "eagle")
    shape = TreeShape.of(((0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)))
    source = with_drafter(open_engine(engine), EagleFeature(model="eagle", choices=CHOICES))
    ranks = KeptRanks(source, 60)
    proposed = Network._proposed

    def second(self: Network, hidden: Tensor, count: int) -> Tensor:
        """The most likely token second."""
        return proposed(self, hidden, count).flip(1) if count == 2 else proposed(self, hidden, count)

    drafter = EagleDrafter(ranks, shape, 4)
    with mock.patch.object(Network, "_proposed", second), Engine(source, ranks, EngineOptions(), drafter) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, requests_for([[5, 9, 2]]))
        found = running.statistics()
    ranks.end()
    # 24 tokens: the prompt's step gives 1, five steps 4 each, and the last one the 3 that are left.
    assert made.tokens == answer
    assert (found.iterations, made.accepted_tokens) == (7, 17)


@pytest.mark.parametrize("kind", FEATURES)
def test_drafts_after_those_of_a_client_are_those_of_the_network(
    llama: LlamaForCausalLM,
    checkpoint: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    drafts: Drafts,
    tmp_path: Path,
    kind: EagleKind,
) -> None:
    """Also where some of the client's were wrong: the network has read the hidden states of those that were right."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=48)
    write_network(engine / "eagle", kind)
    drafts.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    asked = [
        replace(each, drafts=DraftTokens((*answer[: 2 * place], 130, 130)))
        for place, (each, answer) in enumerate(zip(requests_for(prompts), expected, strict=True))
    ]
    options = EngineOptions(speculation=FEATURES[kind], chunked_context=True, kv_reuse=False)
    with Engine.load(engine, options) as running:
        made = generate_with(running, asked)
    assert [each.tokens for each in made] == expected
    assert all(each.accepted_tokens >= 2 * place for place, each in enumerate(made))
    compare(drafts, Reference(llama, engine / "eagle", kind), prompts, most=9)


@pytest.mark.parametrize("kind", FEATURES)
def test_answers_are_those_without_the_network(
    checkpoint: Path, prompts: list[list[int]], expected: list[Tokens], tmp_path: Path, kind: EagleKind
) -> None:
    """Chunked prompts, pauses, reused prefixes, sampled tokens."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=24)
    write_network(engine / "eagle", kind)
    sampled = [
        GenerationRequest(str(seed), (3, 4, 5), 12, SamplingParams(top_p=0.9, temperature=0.7, seed=seed))
        for seed in range(4)
    ]
    (asked, without) = [*requests_for(prompts), *sampled], generate(engine, sampled)
    for options in (
        EngineOptions(speculation=FEATURES[kind], chunked_context=True),
        EngineOptions(
            speculation=FEATURES[kind],
            chunked_context=True,
            scheduler="max_utilization",
            kv_cache_tokens=160,
            kv_reuse=False,
        ),
    ):
        with Engine.load(engine, options) as running:
            made = generate_with(running, asked)
            again = generate_with(running, asked)
            found = running.statistics()
        answers = [*expected, *(each.tokens for each in without)]
        assert [each.tokens for each in made] == answers
        assert [each.tokens for each in again] == answers
        assert (sum(each.reused_blocks for each in again) > 0) == options.kv_reuse
        assert found.kv_blocks_used == 0
        assert found.drafted_tokens > 0
        assert (found.paused_requests > 0) == (options.scheduler == "max_utilization")


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_a_network_that_is_right_saves_steps(tmp_path: Path, kind: EagleKind, tp: int, dtype: str) -> None:
    model = right_network(tmp_path / "network", kind)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(tp=tp))
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype)
    (tmp_path / "network").rename(engine / "eagle")
    source = with_drafter(open_engine(engine), FEATURES[kind])
    ranks = KeptRanks(source, 40)
    drafter = EagleDrafter(ranks, TreeShape.chain(4), 16)
    with Engine(source, ranks, EngineOptions(), drafter) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, requests_for([[5, 9, 2]]))
        found = running.statistics()
    ranks.end()
    # 24 tokens: the prompt's step gives 1, four steps give 5 each, the last one 3.
    assert made.tokens == greedy(model, [[5, 9, 2]], 24)[0]
    assert len(set(made.tokens)) == 24
    assert (found.iterations, found.generated_tokens) == (6, 24)
    assert (made.drafted_tokens, made.accepted_tokens) == (18, 18)


def test_drafts_after_a_reused_prefix_and_in_a_restarted_engine(
    llama: LlamaForCausalLM, checkpoint: Path, drafts: Drafts, tmp_path: Path
) -> None:
    """The network's keys and values lie in the blocks: of the prompt's start, and in files of a store."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    write_network(engine / "eagle")
    options = EngineOptions(speculation=FEATURES["eagle3"], kv_store=KvStoreOptions(tmp_path / "store"))
    prompt = list(range(7, 40))
    for _ in range(2):
        with Engine.load(engine, options) as running:
            for _ in range(2):
                (made,) = generate_with(running, [GenerationRequest("", tuple(prompt), 4)])
    assert made.reused_blocks == 8
    compare(drafts, Reference(llama, engine / "eagle", "eagle3"), [prompt], most=100)
    assert len(drafts.after(prompt)) == 4 * 3


def test_drafts_after_a_prefix_that_came_back_from_host_memory(
    llama: LlamaForCausalLM, checkpoint: Path, drafts: Drafts, tmp_path: Path
) -> None:
    """The network's keys and values go with the blocks; between the two runs another prompt takes all of the cache."""
    engine = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    write_network(engine / "eagle")
    options = EngineOptions(
        speculation=FEATURES["eagle3"], kv_cache_tokens=48, kv_cache_host_memory_bytes=1 << 20, chunked_context=True
    )
    prompt, other = list(range(7, 40)), list(range(50, 90))
    with Engine.load(engine, options) as running:
        for tokens in (prompt, other, prompt):
            (made,) = generate_with(running, [GenerationRequest("", tuple(tokens), 4)])
    assert made.reused_blocks == 8
    compare(drafts, Reference(llama, engine / "eagle", "eagle3"), [prompt, other], most=100)


def test_nothing_is_drafted_for_too_many_requests(
    llama: LlamaForCausalLM, checkpoint: Path, prompts: list[list[int]], drafts: Drafts, tmp_path: Path
) -> None:
    """What is not drafted is written all the same: the last request's drafts are right."""
    engine = write_engine(checkpoint, tmp_path / "engine")
    write_network(engine / "eagle")
    feature = Eagle3Feature(model="eagle", draft_tokens=2, max_requests=1)
    asked = [replace(request, max_tokens=count) for request, count in zip(requests_for(prompts), (8, 24), strict=False)]
    with Engine.load(engine, EngineOptions(speculation=feature)) as running:
        generate_with(running, asked)
    assert {found for _, found in drafts.after(prompts[0])} == {()}
    late = [each for each in drafts.after(prompts[1]) if each[1]]
    assert len(late) > 5
    reference = Reference(llama, engine / "eagle", "eagle3")
    assert late[:4] == [(tokens, reference.draft(list(tokens), len(found))) for tokens, found in late[:4]]


def test_copies_of_a_prompt_are_drafted_after_their_own_first_step(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    engine = write_engine(checkpoint, tmp_path / "engine")
    write_network(engine / "eagle")
    prompt = list(range(7, 30))
    first = GenerationRequest("0", tuple(prompt), 10)
    made = generate(
        engine, [first, replace(first, request_id="1", copy_of="0")], EngineOptions(speculation=FEATURES["eagle3"])
    )
    assert [each.tokens for each in made] == greedy(llama, [prompt, prompt], 10)
    assert all(each.drafted_tokens > 0 for each in made)


def test_networks_of_other_kinds(
    llama: LlamaForCausalLM, checkpoint: Path, prompts: list[list[int]], drafts: Drafts, tmp_path: Path
) -> None:
    """The residual after its norm, an embedding of its own, and the whole vocabulary."""
    generator = torch.Generator().manual_seed(5)
    engine = write_engine(checkpoint, tmp_path / "engine")
    write_network(
        engine / "eagle",
        config={"norm_before_residual": True, "draft_vocab_size": VOCAB},
        **{
            "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        },
    )
    generate(engine, requests_for(prompts[:2]), EngineOptions(speculation=FEATURES["eagle3"]))
    compare(drafts, Reference(llama, engine / "eagle", "eagle3"), prompts[:2], most=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", FEATURES)
def test_recorded_steps_leave_the_same_hidden_states(
    families: Families, tmp_path: Path, kind: EagleKind, dtype: ModelDtype
) -> None:
    """In bfloat16 layers are recorded, as torch computes an LM head of odd width; in float32 whole steps."""
    checkpoint = families("llama").checkpoint()
    config = read_checkpoint_config(checkpoint)
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype, tokens_per_block=4, max_seq_len=32)
    last = config.num_hidden_layers
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "eagle_config": None,
        "eagle_aux_hidden_state_layer_ids": [0, 1, last],
    }
    assert config.hidden_size == HIDDEN
    write_network(engine / "eagle", kind, config=sizes)
    ranks = ThreadRanks(with_drafter(open_engine(engine), FEATURES[kind]), 16)

    def states(at: int, beside: bool) -> torch.Tensor:
        """Of two sequences' tokens at a position and, if `beside`, of a chunk of a third one that samples."""
        more = int(beside)
        step = Step(
            np.array([at, at] + more * [0]),
            np.array([1, 1] + more * [3]),
            np.array([1, 1] + more * [1]),
            np.array([[1, 2], [3, 4], [5, 6]][: 2 + more]),
            np.array([7 + at, 9 + at] + more * [1, 2, 3]),
        )
        ranks.execute(step)
        return ranks.hidden_states().clone()

    for at in range(4):
        for beside in (True, False):
            with mock.patch.object(single_tokens, "MOST_CHUNKED", 0):
                computed = states(at, beside=True)[: 5 if beside else 2]  # with a chunk, which is not recorded
            recorded = [states(at, beside) for _ in range(2)]
            assert computed.shape == (5 if beside else 2, HIDDEN if kind == "eagle" else 3 * HIDDEN)
            assert torch.equal(*recorded)
            assert (recorded[0] - computed).abs().max() <= 2**-5 * computed.abs().max()
    (model,) = ranks.models
    assert model.graphs is not None
    of_steps, of_layers = model.graphs.captured_rows, model.layers.recorded_rows
    assert (of_steps, of_layers) == (((2, 8), ()) if dtype == "float32" else ((), (2,)))  # 5 rows are padded there
    ranks.close()


@pytest.mark.parametrize("name", ["mistral", "gpt2", "deepseek_v2", "qwen3_next"])
@pytest.mark.parametrize("kind", FEATURES)
def test_models_of_other_families(families: Families, tmp_path: Path, name: str, kind: EagleKind) -> None:
    """Windows whose blocks are dropped, learned positions, a latent cache, states of linear attention."""
    engine = write_engine(families(name).checkpoint(), tmp_path / "engine", tokens_per_block=4, max_num_tokens=24)
    config = open_engine(engine).config
    ids = "eagle_aux_hidden_state_layer_ids"
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    layers = {"eagle_config": None, ids: [0, 1, config.num_hidden_layers]} if kind == "eagle3" else {}
    write_network(engine / "eagle", kind, sizes | layers)
    asked = requests_for([list(range(3, 40)), list(range(5, 12))])
    options = EngineOptions(chunked_context=True)
    without = generate(engine, asked, options)
    with Engine.load(engine, replace(options, speculation=FEATURES[kind])) as running:
        made = generate_with(running, asked)
        assert running.statistics().kv_blocks_used == 0
    assert [each.tokens for each in made] == [each.tokens for each in without]
    assert all(each.drafted_tokens > 20 for each in made)
