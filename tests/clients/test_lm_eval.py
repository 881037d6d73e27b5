"""lm-eval's `local-completions` scores through the gateway what the engine scores in process."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tokenizers import Tokenizer

from tests.clients.conftest import Served
from tests.conftest import DEMO_MODEL
from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

PAIRS = (
    ("Return the number of", " items in the list."),
    ("Raises an error if", " the file does not exist."),
    ("A dictionary", " maps keys to values"),
    ("The default", " is None."),
)


@pytest.fixture(scope="module")
def model(served: Served) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{served.url}/completions",
        model="ensemble",
        tokenizer=str(DEMO_MODEL),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_retries=1,
        batch_size=2,
    )


def test_log_likelihoods_equal_the_engines(served: Served, model: LocalCompletionsAPI) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    found = model.loglikelihood(requests)
    asked, starts = [], []
    for context, continuation in PAIRS:
        # lm-eval adds no special tokens.
        whole = tuple(tokenizer.encode(context + continuation, add_special_tokens=False).ids)
        starts.append(len(tokenizer.encode(context, add_special_tokens=False).ids))
        sampling = SamplingParams(return_log_probs=True, prompt_log_probs=True, top_log_probs=1)
        asked.append(GenerationRequest("", whole, 1, sampling))
    with Engine.load(served.repository / "tensorrt_llm" / "1" / "engine") as engine:
        answers = generate_with(engine, asked)
    for (score, greedy), answer, start, request in zip(found, answers, starts, asked, strict=True):
        scores = answer.prompt_log_probs
        assert scores is not None
        assert score == pytest.approx(sum(scores.values[start - 1 :]), abs=1e-3)
        likeliest = [top[0][0] for top in scores.top[start - 1 :]]
        assert greedy == (likeliest == list(request.prompt[start:]))


def test_generation_stops_at_its_words(model: LocalCompletionsAPI) -> None:
    options = {"until": ["\n", "."], "max_gen_toks": 16, "do_sample": False}
    requests = [Instance("generate_until", {}, (context, options), number) for number, (context, _) in enumerate(PAIRS)]
    texts = model.generate_until(requests)
    assert len(texts) == len(PAIRS)
    assert any(texts)
    assert all("\n" not in text and "." not in text for text in texts)
