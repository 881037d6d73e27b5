"""Draft tokens that come with requests: verified like those of a drafter, beside any schedule and every option."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.runtime.adapters import save_adapter
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.converted import Families
from tests.runtime.test_deferred import AheadRanks
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.compile.stage import compile_engine
from trtforge.core.errors import RequestError
from trtforge.core.features import FeaturesConfig, LookaheadFeature, LoraFeature
from trtforge.core.recipe import EngineConfig, SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, DraftTokens, GenerationRequest, SamplingParams
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate, generate_with
from trtforge.runtime.ranks.source import open_engine

VOCABULARY = 131
DRAWN = SamplingParams(top_k=20, temperature=1.3, seed=5)


def drafting(request: GenerationRequest, tokens: Sequence[int], logits: np.ndarray | None = None) -> GenerationRequest:  # type: ignore[type-arg]
    data = b"" if logits is None else logits.astype(np.float32).tobytes()
    return replace(request, drafts=DraftTokens(tuple(tokens), data))


def drafts_of(kind: str, answer: Tokens, count: int) -> Tokens:
    """Right ones, with a wrong one in the middle, or all wrong."""
    changed = {"right": count, "half": count // 2, "wrong": 0}[kind]
    return (*answer[:changed], *((token + 1) % VOCABULARY for token in answer[changed:count]))


def accepted(drafts: Tokens, answer: Tokens) -> int:
    """Number of draft tokens before the first wrong one."""
    return next((index for index, pair in enumerate(zip(drafts, answer, strict=False)) if len(set(pair)) > 1), 24)


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "ahead"])
def test_greedy_tokens_are_those_without_drafts_under_any_schedule(
    llama: LlamaForCausalLM, tmp_path: Path, layout: str, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    ranked = {"tp2": Layout(tp=2), "pp2": Layout(pp=2)}.get(layout, Layout())
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint", ranked)
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=24))
    kind_of = AheadRanks if layout == "ahead" else KeptRanks
    ranks = {blocks: kind_of(source, blocks) for blocks in (30, 64)}
    totals = [0, 0]

    @settings(
        max_examples=40 if layout in ("one", "ahead") else 8,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        chosen=st.lists(
            st.tuples(st.integers(0, 7), st.sampled_from(["none", "right", "half", "wrong"]), st.integers(1, 23)),
            min_size=1,
            max_size=6,
        ),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([30, 64]),
        batch=st.integers(1, 6),
        own=st.booleans(),
    )
    def check(
        chosen: list[tuple[int, str, int]], policy: SchedulerPolicy, reuse: bool, blocks: int, batch: int, own: bool
    ) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        asked = requests_for([prompts[index] for index, _, _ in chosen])
        for at, (index, kind, count) in enumerate(chosen):
            if kind != "none":
                asked[at] = drafting(asked[at], drafts_of(kind, expected[index], count))
        drafter = NgramDrafter(NGRAMS) if own and layout != "ahead" else None
        with Engine(source, ranks[blocks], options, drafter) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
            found = engine.statistics()
        assert [generation.tokens for generation in made] == [expected[index] for index, _, _ in chosen]
        assert found.kv_blocks_used == 0
        assert found.accepted_tokens == sum(each.accepted_tokens for each in made) <= found.drafted_tokens
        if drafter is None:
            for each, request, (index, _, _) in zip(made, asked, chosen, strict=True):
                offered = request.drafts.tokens if request.drafts is not None else ()
                assert each.drafted_tokens <= len(offered)
                assert each.accepted_tokens <= accepted(offered, expected[index])
        totals[0] += found.drafted_tokens
        totals[1] += found.accepted_tokens

    check()
    assert totals[0] > totals[1] > 0
    for each in ranks.values():
        each.end()


def test_right_drafts_are_verified_in_the_step_of_the_prompt(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    ranks = KeptRanks(open_engine(engine_directory), 40)
    steps = []
    for drafts in (expected[1][:20], drafts_of("half", expected[1], 20), ()):
        (request,) = requests_for(prompts[1:2])
        asked = drafting(request, drafts) if drafts else request
        with Engine(open_engine(engine_directory), ranks, EngineOptions()) as engine:  # type: ignore[arg-type]
            (made,) = generate_with(engine, [asked])
            found = engine.statistics()
        assert made.tokens == expected[1]
        assert (made.drafted_tokens, made.accepted_tokens) == (found.drafted_tokens, found.accepted_tokens)
        steps.append((found.iterations, made.drafted_tokens, made.accepted_tokens))
    ranks.end()
    assert steps == [(24 - 20, 20, 20), (24 - 10, 20, 10), (24, 0, 0)]


@pytest.mark.parametrize("prompt", [0, 3])
def test_drafts_beyond_a_steps_tokens_are_verified_in_the_next_ones(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]], expected: list[Tokens], prompt: int
) -> None:
    """A prompt of 5 tokens or 1 leaves 3 or 7 of 8; each later step has room for 7 drafts beside its own token."""
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", max_num_tokens=8))
    ranks = KeptRanks(source, 40)
    (request,) = requests_for([prompts[prompt]])
    asked = drafting(request, expected[prompt][:23])
    with Engine(source, ranks, EngineOptions(chunked_context=True)) as engine:  # type: ignore[arg-type]
        (made,) = generate_with(engine, [asked])
        steps = engine.statistics().iterations
    ranks.end()
    assert made.tokens == expected[prompt]
    assert steps == 1 + -(-(24 - 1 - (8 - len(prompts[prompt]))) // 8)
    assert made.drafted_tokens == made.accepted_tokens == 24 - steps


def test_options_hold_within_drafts(engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]) -> None:
    """Each request twice: without drafts, and with what it then got."""
    plain = requests_for(prompts[:3], 20)
    asked = [
        replace(plain[0], end_ids=frozenset({expected[0][7]})),
        replace(plain[1], stop_words=(expected[1][6:8],)),
        replace(plain[2], max_tokens=5),
        *(replace(each, sampling=SamplingParams(repetition_penalty=1.4, min_tokens=3)) for each in plain),
        *(replace(each, bad_words=((expected[0][3],), expected[1][2:4])) for each in plain),
        *(replace(each, sampling=SamplingParams(return_log_probs=True, top_log_probs=2)) for each in plain),
        *(replace(each, sampling=SamplingParams(prompt_log_probs=True)) for each in plain),
        *(replace(each, sampling=DRAWN) for each in plain),
    ]
    source = open_engine(engine_directory)
    ranks = KeptRanks(source, 96)
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        without = generate_with(engine, asked)
        likely = [drafting(each, (*made.tokens, 7)) for each, made in zip(asked, without, strict=True)]
        drafted = generate_with(engine, likely)
    ranks.end()
    for before, after in zip(without, drafted, strict=True):
        assert (after.tokens, after.finish_reason) == (before.tokens, before.finish_reason)
        assert after.log_probs == pytest.approx(before.log_probs, abs=1e-4)
        assert (after.prompt_log_probs is None) == (before.prompt_log_probs is None)
        if before.prompt_log_probs is not None and after.prompt_log_probs is not None:
            assert after.prompt_log_probs.values == pytest.approx(before.prompt_log_probs.values, abs=1e-4)
        assert after.accepted_tokens >= len(after.tokens) - 2


def test_copies_verify_the_drafts_after_their_first_token(engine_directory: Path, prompts: list[list[int]]) -> None:
    source = open_engine(engine_directory)
    ranks = KeptRanks(source, 96)
    (request,) = requests_for(prompts[1:2], 12, sampling=SamplingParams(top_k=2, temperature=0.5, seed=0))
    asked = [
        replace(request, copy_of="0" if seed else None, sampling=replace(request.sampling, seed=seed))
        for seed in range(6)
    ]
    with Engine(source, ranks, EngineOptions()) as engine:  # type: ignore[arg-type]
        without = generate_with(engine, asked)
        drafts = without[0].tokens[:8]
        drafted = generate_with(engine, [drafting(each, drafts) for each in asked])
    ranks.end()
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    assert drafted[0].accepted_tokens == 8
    assert all(each.accepted_tokens <= 7 for each in drafted[1:])


@pytest.mark.parametrize("name", ["qwen3_next", "gemma2", "mistral", "deepseek_v2"])
def test_every_kind_of_cache_verifies_them(families: Families, tmp_path: Path, name: str) -> None:
    """Linear attention, whose states say nothing of positions within a chunk, verifies them in the next step."""
    family = families(name)
    engine = compile_engine(
        EngineConfig(backend="torch", device="cpu", max_batch_size=4, max_num_tokens=256, max_seq_len=128),
        family.checkpoint(),
        tmp_path / "engine",
    ).path
    prompts = [[5, 17, 9, 60, 31, 7] * 6, [9, 8]]
    answers = [each.tokens for each in generate(engine, requests_for(prompts))]
    asked = requests_for(prompts)
    for kind in ("right", "half"):
        likely = [drafting(each, drafts_of(kind, answer, 20)) for each, answer in zip(asked, answers, strict=True)]
        made = generate(engine, likely, EngineOptions(chunked_context=True))
        assert [each.tokens for each in made] == answers
        assert min(each.accepted_tokens for each in made) >= (9 if kind == "half" else 19)


@pytest.mark.parametrize("right", [0, 5, 12])
def test_lookahead_goes_on_after_them(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], right: int
) -> None:
    asked = [
        drafting(each, (*answer[:right], (answer[right] + 1) % VOCABULARY))
        for each, answer in zip(requests_for(prompts), expected, strict=True)
    ]
    speculation = LookaheadFeature(window=4, ngram=3, verification=4)
    made = generate(engine_directory, asked, EngineOptions(speculation=speculation))
    assert [each.tokens for each in made] == expected
    assert all(each.drafted_tokens > right + 1 and each.accepted_tokens >= right for each in made)


def test_adapters_take_part(
    checkpoint: Path, llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Requests of two adapters and of none beside each other, each with the drafts of its own answer."""
    adapters = [str(save_adapter(llama, tmp_path / f"a{seed}", seed, r=4)) for seed in (1, 2)]
    features = FeaturesConfig(lora=LoraFeature(adapters=tuple(adapters)))
    engine = compile_engine(
        EngineConfig(backend="torch", device="cpu", features=features), checkpoint, tmp_path / "engine"
    ).path
    asked = [replace(each, lora_task_id=at % 3 or None) for at, each in enumerate(requests_for(prompts[:6]))]
    without = generate(engine, asked)
    drafted = generate(
        engine, [drafting(each, made.tokens[:15]) for each, made in zip(asked, without, strict=True)], EngineOptions()
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    assert all(each.accepted_tokens >= 14 for each in drafted)


def chi_square(found: list[Generation], shares: dict[Tokens, float]) -> float:
    counts = dict.fromkeys(shares, 0)
    for generation in found:
        counts[generation.tokens[:3]] += 1
    whole = len(found)
    return sum((counts[key] - whole * share) ** 2 / (whole * share) for key, share in shares.items())


@pytest.fixture(scope="module")
def following(llama: LlamaForCausalLM) -> dict[Tokens, float]:
    """The exact shares of the first three tokens after a prompt, of the three most likely ones each."""
    shares: dict[Tokens, float] = {(): 1.0}
    for _ in range(3):
        longer: dict[Tokens, float] = {}
        for tokens, share in shares.items():
            with torch.no_grad():
                likeliest = (llama(torch.tensor([[7, 90, 41, *tokens]])).logits[0, -1] / 1.5).topk(3)
            for token, p in zip(likeliest.indices.tolist(), likeliest.values.softmax(0).tolist(), strict=True):
                longer[(*tokens, token)] = share * p
        shares = longer
    return shares


def drawn_drafts(following: dict[Tokens, float], count: int) -> list[GenerationRequest]:
    """Requests with two draft tokens each, drawn from other distributions than the engine's, and their logits."""
    generator = torch.Generator().manual_seed(11)
    first, second = (torch.randn(VOCABULARY, generator=generator) for _ in range(2))
    for tokens in following:  # likely ones, so that some are accepted
        first[tokens[0]], second[tokens[1]] = 5.0, 4.0
    logits = torch.stack([first, second])
    tokens = torch.multinomial(logits.softmax(1), count, replacement=True, generator=generator).T.tolist()
    params = SamplingParams(top_k=3, temperature=1.5)
    return [
        drafting(GenerationRequest("", (7, 90, 41), 4, replace(params, seed=seed)), proposed, logits.numpy())
        for seed, proposed in enumerate(tokens)
    ]


@pytest.mark.parametrize("room", [2048, 4])
def test_samples_verified_against_logits_have_the_engines_distribution(
    checkpoint: Path, tmp_path: Path, following: dict[Tokens, float], room: int
) -> None:
    """Chi-square of the first three tokens, over 1,500 seeds; also where the prompt's step has room for one draft."""
    asked = drawn_drafts(following, 1500)
    batch = 64 if room > 64 else 1
    engine = write_engine(checkpoint, tmp_path / "engine", max_batch_size=batch, max_num_tokens=room)
    made = generate(engine, asked, EngineOptions(chunked_context=True))
    assert len(following) == 27
    assert chi_square(made, following) < 54.1  # 26 degrees of freedom, p = 0.001
    rate = sum(each.accepted_tokens for each in made) / sum(each.drafted_tokens for each in made)
    assert 0.2 < rate < 0.95


def test_a_threshold_takes_the_place_of_the_random_number(
    engine_directory: Path, following: dict[Tokens, float]
) -> None:
    """Accepted where the ratio of the probabilities reaches it; what is impossible for the request never is."""
    likely = {tokens[:1]: 0.0 for tokens in following}
    for tokens, share in following.items():
        likely[tokens[:1]] += share
    (best,), share = max(likely.items(), key=lambda each: each[1])
    logits = np.full((1, VOCABULARY), -1e9, dtype=np.float32)
    logits[0, best] = 0.0  # the draft's probability is 1, so the ratio is the engine's
    other = next(token for token in range(VOCABULARY) if (token,) not in likely)
    unlikely = np.full((1, VOCABULARY), -1e9, dtype=np.float32)
    unlikely[0, other] = 0.0
    base = GenerationRequest("", (7, 90, 41), 1, SamplingParams(top_k=3, temperature=1.5))

    def first_tokens(token: int, logits: np.ndarray, threshold: float) -> set[int]:  # type: ignore[type-arg]
        drafts = DraftTokens((token,), logits.tobytes(), threshold)
        asked = [
            replace(base, max_tokens=2, drafts=drafts, sampling=replace(base.sampling, seed=seed)) for seed in range(60)
        ]
        return {each.tokens[0] for each in generate(engine_directory, asked)}

    assert first_tokens(best, logits, share - 0.01) == {best}
    rejected = first_tokens(best, logits, min(1.0, share + 0.01))
    assert rejected == {tokens[0] for tokens in likely} - {best}  # only what the draft gave too little
    assert other not in first_tokens(other, unlikely, 1e-6)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_an_impossible_token_is_rejected_where_the_distributions_are_equal(
    engine_directory: Path, threshold: float
) -> None:
    """Nothing is left of the request's distribution without the draft's: the token comes from the request's own."""
    one = GenerationRequest("", (3, 4, 5), 4, SamplingParams(top_p=0.01, seed=1))  # one token is left
    (plain,) = generate(engine_directory, [one])
    logits = np.full((1, VOCABULARY), -1e9, dtype=np.float32)
    logits[0, plain.tokens[0]] = 0.0
    other = (plain.tokens[0] + 1) % VOCABULARY
    (made,) = generate(engine_directory, [replace(one, drafts=DraftTokens((other,), logits.tobytes(), threshold))])
    assert (made.tokens, made.accepted_tokens) == (plain.tokens, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_requests_end_with_their_drafts_if_they_ask_so(families: Families, tmp_path: Path, name: str) -> None:
    """With one token more than were accepted, as for TensorRT-LLM's engines."""
    engine = compile_engine(
        EngineConfig(backend="torch", device="cpu"), families(name).checkpoint(), tmp_path / "out"
    ).path
    (request,) = requests_for([[5, 17, 9, 60]])
    (without,) = generate(engine, [request])
    for kind, count, made in (("right", 6, 7), ("half", 6, 4), ("wrong", 6, 1)):
        drafts = DraftTokens(drafts_of(kind, without.tokens, count), alone=True)
        (found,) = generate(engine, [replace(request, drafts=drafts)])
        assert (found.tokens, found.finish_reason) == (without.tokens[:made], "length")
    drafts = DraftTokens(without.tokens[:6], alone=True)
    (ended,) = generate(engine, [replace(request, end_ids=frozenset(without.tokens[3:4]), drafts=drafts)])
    assert (ended.tokens, ended.finish_reason) == (without.tokens[:3], "end_id")


def test_copies_end_with_their_drafts_too(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """Their first token is sampled, not verified; a wrong draft ends them with it."""
    (request,) = requests_for(prompts[:1])
    for kind, made in (("right", 7), ("wrong", 1)):
        asked = replace(request, drafts=DraftTokens(drafts_of(kind, expected[0], 6), alone=True))
        found = generate(engine_directory, [asked, *[replace(asked, copy_of="0")] * 2])
        assert [each.tokens for each in found] == [expected[0][:made]] * 3


def test_logits_of_a_greedy_request_change_nothing(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    (request,) = requests_for(prompts[:1])
    likely = drafting(request, expected[0][:4], np.zeros((4, VOCABULARY)))
    (made,) = generate(engine_directory, [likely])
    assert (made.tokens, made.accepted_tokens) == (expected[0], 4)


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (DraftTokens(()), "draft_input_ids is empty"),
        (DraftTokens((4, 131)), "draft_input_ids holds token ids outside of the vocabulary of 131"),
        (DraftTokens((4, -1)), "draft_input_ids holds token ids outside of the vocabulary of 131"),
        (DraftTokens((4,) * 190), "draft_input_ids has 190 tokens, max_seq_len leaves 189 after the prompt"),
        (DraftTokens((4,), threshold=1.5), r"draft_acceptance_threshold is 1\.5"),
        (DraftTokens((4,), threshold=float("nan")), "draft_acceptance_threshold is nan"),
        (DraftTokens((4, 5), bytes(4 * 131)), "draft_logits has 131 values"),
        (
            DraftTokens((4,), np.full(131, np.inf, dtype=np.float32).tobytes()),
            "draft_logits has values that are not finite",
        ),
    ],
)
def test_bad_drafts_are_refused_by_name(engine_directory: Path, drafts: DraftTokens, message: str) -> None:
    (made,) = generate(engine_directory, [GenerationRequest("", (5, 6, 7), 4, drafts=drafts)])
    assert isinstance(made.error, RequestError)
    with pytest.raises(RequestError, match=message):
        raise made.error
    assert made.error.hint


def test_beams_take_no_drafts(checkpoint: Path, tmp_path: Path) -> None:
    engine = write_engine(checkpoint, tmp_path / "engine", max_beam_width=2)
    asked = GenerationRequest("", (5, 6, 7), 4, beams=BeamParams(2, 2), drafts=DraftTokens((4,)))
    (made,) = generate(engine, [asked])
    assert made.error is not None
    assert made.error.message == "draft_input_ids is given for a beam search"
