"""Steps of a draft and a target model: what they give together is what the target gives alone."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

VOCAB, END = 23, 0
MOST = 4


pytestmark = pytest.mark.usefixtures("library")


def following(tokens: list[int], *, barred: bool = False) -> int:
    """The target's next token: any function of all tokens before it. `barred`: the end id has no probability."""
    found = 1
    for token in tokens[-5:]:
        found = (found * 31 + token * 7 + len(tokens)) % VOCAB
    return 1 if barred and found == END else found


class Models:
    """Both engine models. The draft model is wrong wherever `errs` says so, or fails after `fails` requests."""

    def __init__(self, errs: list[bool], fails: int | None = None, *, keeps_end: bool = False) -> None:
        self.errs, self.fails, self.keeps_end = errs or [False], fails, keeps_end
        self.asked: list[tuple[str, dict[str, NDArray[Any]]]] = []

    async def answer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: list[str]
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        self.asked.append((model, dict(inputs)))
        count = int(inputs["request_output_len"][0, 0])
        least = int(inputs["min_tokens"][0, 0]) if "min_tokens" in inputs else 0
        length = int(inputs["input_lengths"][0, 0])
        tokens = inputs["input_ids"][0][:length].tolist()
        if model == "draft":
            if self.fails is not None and sum(name == "draft" for name, _ in self.asked) > self.fails:
                from triton_engine import EngineError  # type: ignore[import-not-found]

                raise EngineError("the prompt is too long")
            made = self._drafts(tokens, count)
        else:
            made = self._verified(tokens, count, least, inputs.get("draft_input_ids"))
        answer = {"output_ids": np.array([[made]], dtype=np.int32), "sequence_length": np.array([[len(made)]])}
        if model == "draft" and "return_generation_logits" in inputs:
            answer["generation_logits"] = np.zeros((1, 1, count, VOCAB), dtype=np.float32)
        yield answer

    def _drafts(self, tokens: list[int], count: int) -> list[int]:
        made: list[int] = []
        for _ in range(count):
            right = following([*tokens, *made])
            wrong = self.errs[(len(tokens) + len(made)) % len(self.errs)]
            made.append((right + 1) % VOCAB if wrong else right)
        return made

    def _verified(self, tokens: list[int], count: int, least: int, drafts: NDArray[Any] | None) -> list[int]:
        """Draft tokens as long as they are the target's own, and one more; the end id ends it."""
        offered = [] if drafts is None else drafts[0].tolist()
        assert drafts is None or count == len(offered) + 1
        made: list[int] = []
        while len(made) < count:
            token = following([*tokens, *made], barred=len(made) < least)
            if token == END:
                return [*made, *([END] if self.keeps_end else [])]
            made.append(token)
            if offered and (len(made) > len(offered) or offered[len(made) - 1] != token):
                break
        return made


class Received:
    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def take(self, pieces: list[Any]) -> None:
        self.pieces += pieces

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.beams[0]]


def request(prompt: list[int], count: int, **more: Any) -> dict[str, NDArray[Any]]:
    values = {
        "input_ids": np.array([prompt], dtype=np.int32),
        "input_lengths": np.array([[len(prompt)]], dtype=np.int32),
        "request_output_len": np.array([[count]], dtype=np.int32),
        "end_id": np.array([[END]], dtype=np.int32),
        "streaming": np.array([[True]]),
    }
    return values | {name: np.array([[value]]) for name, value in more.items()}


def run(models: Models, inputs: Mapping[str, NDArray[Any]]) -> Received:
    from drafted_engine import DraftedEngine  # type: ignore[import-not-found]

    engine = object.__new__(DraftedEngine)
    engine._model, engine._draft_model, engine._most_drafts = "target", "draft", MOST
    engine._outputs = ["output_ids", "sequence_length"]
    engine._least, engine._seed = "min_tokens", "seed"
    engine._responses_of = models.answer
    received = Received()
    asyncio.run(engine._pass_on(inputs, received))
    return received


def alone(prompt: list[int], count: int, least: int = 0) -> list[int]:
    made: list[int] = []
    while len(made) < count:
        token = following([*prompt, *made], barred=len(made) < least)
        if token == END:
            break
        made.append(token)
    return made


tokens = st.integers(1, VOCAB - 1)


@settings(deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=12),
    st.integers(1, 30),
    st.lists(st.booleans(), max_size=7),
    st.integers(0, 12),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, MOST),
)
def test_tokens_are_those_of_the_target_alone(
    prompt: list[int], count: int, errs: list[bool], least: int, fails: int | None, drafts: int | None
) -> None:
    models = Models(errs, fails)
    more = {"min_tokens": least} if least else {}
    more |= {"num_draft_tokens": drafts} if drafts is not None else {}
    assert run(models, request(prompt, count, **more)).tokens == alone(prompt, count, least)
    for model, inputs in models.asked:
        assert inputs["request_output_len"][0, 0] <= (MOST if model == "draft" else max(MOST + 1, count))
        assert "num_draft_tokens" not in inputs


@pytest.mark.parametrize("keeps_end", [False, True])
def test_a_good_draft_model_saves_steps(keeps_end: bool) -> None:
    prompt = next([p] for p in range(1, VOCAB) if len(alone([p], 20)) == 20)
    models = Models([False], keeps_end=keeps_end)
    assert run(models, request(prompt, 20)).tokens == alone(prompt, 20)
    steps = [inputs for model, inputs in models.asked if model == "target"]
    assert len(steps) == 4  # 5 tokens each
    assert [len(inputs["draft_input_ids"][0]) for inputs in steps] == [4, 4, 4, 4]
    assert all(inputs["draft_input_ids"].dtype == np.int32 for inputs in steps)
    assert not any(inputs["streaming"].any() for _, inputs in models.asked)


def test_the_end_may_be_part_of_the_answer() -> None:
    prompt = next([p] for p in range(1, VOCAB) if 2 < len(alone([p], 40)) < 40)
    models = Models([False], keeps_end=True)
    assert run(models, request(prompt, 40)).tokens == [*alone(prompt, 40), END]
    assert following([*prompt, *alone(prompt, 40)]) == END


def test_a_stop_word_ends_it() -> None:
    from word_lists import word_list  # type: ignore[import-not-found]

    prompt = next([p] for p in range(1, VOCAB) if len(alone([p], 20)) == 20)
    whole = alone(prompt, 20)
    models = Models([True])  # one token a step
    found = run(models, request(prompt, 20) | {"stop_words_list": word_list([whole[5:7]])}).tokens
    assert found == whole[:7]


def test_logits_of_the_draft_go_to_the_target() -> None:
    prompt = next([p] for p in range(1, VOCAB) if len(alone([p], 8)) == 8)
    models = Models([False])
    run(models, request(prompt, 8, use_draft_logits=True))
    drafts = [inputs for model, inputs in models.asked if model == "draft"]
    targets = [inputs for model, inputs in models.asked if model == "target"]
    assert all(inputs["return_generation_logits"].all() for inputs in drafts)
    assert [inputs["draft_logits"].shape for inputs in targets] == [(1, 4, VOCAB), (1, 2, VOCAB)]
    assert not any("use_draft_logits" in inputs for _, inputs in models.asked)


def test_each_step_draws_other_random_numbers_and_adapters_are_the_targets() -> None:
    prompt = next([p] for p in range(1, VOCAB) if len(alone([p], 12)) == 12)
    models = Models([False])
    run(models, request(prompt, 12, seed=2**64 - 1, lora_task_id=3))
    seeds = [int(inputs["seed"][0, 0]) for model, inputs in models.asked if model == "target"]
    assert seeds == [2**64 - 1, 4, 9]
    assert all(inputs["seed"].dtype == np.uint64 for _, inputs in models.asked)
    assert all(("lora_task_id" in inputs) == (model == "target") for model, inputs in models.asked)


@pytest.mark.parametrize(
    "more",
    [
        {"num_draft_tokens": 0},
        {"beam_width": 2},
        {"num_return_sequences": 2},
        {"return_log_probs": True},
        {"return_context_logits": True},
        {"guided_decoding_guide_type": b"json"},
    ],
)
def test_requests_that_are_not_drafted_go_to_the_target_as_they_are(more: dict[str, Any]) -> None:
    models = Models([False])
    run(models, request([3], 6, **more))
    assert [model for model, _ in models.asked] == ["target"]
    assert models.asked[0][1]["streaming"].all()
    assert {name for name in more if name != "num_draft_tokens"} <= set(models.asked[0][1])


def test_more_draft_tokens_than_the_engine_verifies_are_refused() -> None:
    from responder import RequestFailed  # type: ignore[import-not-found]

    with pytest.raises(RequestFailed, match=r"num_draft_tokens 5: the engine verifies 0 to 4 draft tokens"):
        run(Models([]), request([3], 6, num_draft_tokens=5))
