"""Features of the executor from a recipe to a server: LoRA adapters, prompt tables, logits, beams of text models."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import NotFoundError, OpenAI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from tritonclient import grpc as triton

from tests.assault.server import Server, serving
from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from tests.runtime.adapters import lora_tensors, save_adapter, with_adapter
from tests.runtime.tables import save_tuning, with_tuning
from trtforge import Engine, SamplingParams, Tuned, read_prompt_table
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import RequestError
from trtforge.core.features import FeaturesConfig, LoraFeature
from trtforge.core.recipe import EngineConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

PROMPT, NEW = "Return the number of", 16
NAMES = (None, "sql", "chat")
ROWS = 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the demo model with two adapters, logits and beams."""
    place = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    adapters = [str(save_adapter(model, place / name, n, r=4 + n)) for n, name in enumerate(NAMES) if name]
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, place / "checkpoint").path
    lora = LoraFeature(adapters=tuple(adapters))
    features = FeaturesConfig(
        lora=lora, context_logits=True, generation_logits=True, max_prompt_embedding_table_size=64 * ROWS
    )
    config = EngineConfig(backend="torch", features=features, max_beam_width=3)
    engine = compile_engine(config, checkpoint, place / "engine").path
    package(PackageConfig(), engine, None, place / "repository")
    return place


@pytest.fixture(scope="module")
def texts(place: Path) -> dict[str | None, str]:
    """PEFT's greedy answer with each adapter, and that of the model alone."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = tokenizer.encode(PROMPT).ids
    found = {}
    for name in NAMES:
        own = model if name is None else with_adapter(model, place / name)
        given = torch.tensor([ids])
        made = own.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)[0]
        found[name] = tokenizer.decode(made.tolist())[len(tokenizer.decode(ids)) :]
    assert len(set(found.values())) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[tuple[Server, str]]:
    with serving(place / "repository") as server:
        assert eventually(lambda: len(server.output) > 1)
        yield server, server.output[1].removeprefix("openai=")


def test_the_python_api_names_adapters(place: Path, texts: dict[str | None, str]) -> None:
    with Engine.load(place / "engine") as engine:
        params = [SamplingParams(max_tokens=NEW, adapter=name) for name in NAMES]
        assert [answer.text for answer in engine.generate([PROMPT] * 3, params)] == list(texts.values())
        with pytest.raises(RequestError, match="'other' is not an adapter of this engine") as raised:
            engine.generate(PROMPT, SamplingParams(adapter="other"))
    assert raised.value.hint == "Its adapters: sql, chat."


def test_adapters_are_models_of_openais_api(served: tuple[Server, str], texts: dict[str | None, str]) -> None:
    client = OpenAI(base_url=served[1], api_key="none", max_retries=0, timeout=PATIENCE)
    assert [model.id for model in client.models.list()] == ["ensemble", "sql", "chat"]

    def answer(name: str | None) -> tuple[str, str]:
        made = client.completions.create(model=name or "ensemble", prompt=PROMPT, max_tokens=NEW, temperature=0)
        return made.model, made.choices[0].text

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(answer, [*NAMES, *NAMES]))
    assert made == [(name or "ensemble", texts[name]) for name in (*NAMES, *NAMES)]
    with pytest.raises(NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)


def ask(server: Server, model: str, stream: bool = False, **more: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The tensors of each response. Raises what the server said."""
    text = {"text_input": np.array([[PROMPT]], dtype=object), "max_tokens": np.array([[NEW]], dtype=np.int32)}
    return ask_tensors(server, model, {**text, "stream": np.array([[stream]]), **more})


def ask_tensors(server: Server, model: str, tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """As `ask`, with all tensors."""
    client = triton.InferenceServerClient(server.grpc)
    inputs = []
    for name, value in tensors.items():
        kind = {"O": "BYTES", "i": "INT32", "u": "UINT64", "b": "BOOL", "f": f"FP{8 * value.itemsize}"}[
            value.dtype.kind
        ]
        inputs.append(triton.InferInput(name, value.shape, kind))
        inputs[-1].set_data_from_numpy(value)
    found: list[object] = []
    client.start_stream(lambda result, error: found.append(error or result))
    client.async_stream_infer(model, inputs)
    client.stop_stream()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [
        {tensor.name: each.as_numpy(tensor.name) for tensor in each.get_response().outputs}  # type: ignore[attr-defined]
        for each in found
    ]


def test_task_ids_are_those_of_the_recipe(served: tuple[Server, str], texts: dict[str | None, str]) -> None:
    def answer(model: str, task: int) -> str:
        (found,) = ask(served[0], model, lora_task_id=np.array([[task]], dtype=np.uint64))
        return str(found["text_output"].flat[0].decode())

    assert [answer("ensemble", 1), answer("tensorrt_llm_bls", 2)] == [texts["sql"], texts["chat"]]
    with pytest.raises(
        Exception, match=r"lora_task_id 3 is not an adapter of this engine. Task ids: 1, 2. Send lora_weights"
    ):
        answer("ensemble", 3)


def test_adapters_come_with_requests(place: Path, served: tuple[Server, str], texts: dict[str | None, str]) -> None:
    """A model of the repository takes the tensors once, then all of its models know the id."""

    def answer(model: str, task: int, **sent: np.ndarray) -> str:
        (found,) = ask(served[0], model, lora_task_id=np.array([[task]], dtype=np.uint64), **sent)
        return str(found["text_output"].flat[0].decode())

    tensors = [lora_tensors(place / name) for name in ("sql", "chat")]
    sent = [{"lora_weights": weights.astype(np.float16), "lora_config": config} for config, weights in tensors]
    assert answer("ensemble", 2**63 + 5, **sent[0]) == texts["sql"]
    assert answer("tensorrt_llm_bls", 9, **sent[1]) == texts["chat"]
    assert [answer("tensorrt_llm_bls", 2**63 + 5), answer("ensemble", 9)] == [texts["sql"], texts["chat"]]
    later = np.pad(sent[1]["lora_config"], ((0, 0), (0, 0), (0, 1)))  # a column for DoRA
    assert answer("ensemble", 11, **(sent[1] | {"lora_config": later})) == texts["chat"]
    with pytest.raises(Exception, match="lora_weights cannot be sent for lora_task_id 1, an adapter of the engine"):
        answer("ensemble", 1, **sent[0])
    with pytest.raises(Exception, match="lora_config is missing"):
        answer("ensemble", 10, lora_weights=sent[0]["lora_weights"])
    wrong = sent[0]["lora_config"].copy()
    wrong[0, 0, 1] = 99
    with pytest.raises(Exception, match=r"lora_config has layer 99 in row 0. It must be from 0 to"):
        answer("ensemble", 10, **(sent[0] | {"lora_config": wrong}))


def test_prompt_tables_come_with_requests(place: Path, served: tuple[Server, str], tmp_path: Path) -> None:
    """Before a text as in PEFT, with rows in float16; as ids of the engine's model, which gives them back."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    adapter = save_tuning(model, tmp_path / "tuning", ROWS, 1)
    rows = read_prompt_table(adapter).half()
    tuned = with_tuning(model, adapter)
    tuned.prompt_encoder["default"].embedding.weight.data.copy_(rows.float())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    given = torch.tensor([ids])
    made = tuned.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )[0].tolist()
    text, vocabulary = tokenizer.decode(made)[len(tokenizer.decode(ids)) :], model.config.vocab_size
    size = {"prompt_vocab_size": np.array([[ROWS]], dtype=np.int32)}
    halves = size | {"prompt_embedding_table": rows.numpy()[None]}
    sent = size | {"prompt_embedding_table": rows.float().numpy()[None]}  # the engine's type, but for the ensemble
    extra = {"prompt_table_extra_id": np.array([[2**63 + 1]], dtype=np.uint64)}
    for name, own in (("ensemble", halves), ("tensorrt_llm_bls", sent)):
        for more in ({}, extra, extra):
            (found,) = ask(served[0], name, **own, **more)
            assert found["text_output"].flat[0].decode() == text
        streamed = ask(served[0], name, stream=True, **own)
        assert b"".join(each["text_output"].flat[0] for each in streamed).decode() == text
    with Engine.load(place / "engine") as engine:
        assert engine.generate(Tuned(PROMPT, rows), SamplingParams(max_tokens=NEW)).text == text
    prompt = [*range(vocabulary, vocabulary + ROWS), *ids]
    tensors = {
        "input_ids": np.array([prompt], dtype=np.int32),
        "input_lengths": np.array([[len(prompt)]], dtype=np.int32),
        "request_output_len": np.array([[NEW]], dtype=np.int32),
        "prompt_table_extra_ids": np.array([[5] * ROWS + [0] * len(ids)], dtype=np.uint64),
        "exclude_input_in_output": np.array([[False]]),
    }
    (found,) = ask_tensors(served[0], "tensorrt_llm", sent | tensors)
    assert found["output_ids"].reshape(-1).tolist() == prompt + made[len(ids) :]
    asked = {"input_ids": tensors["input_ids"], "max_tokens": np.array([[NEW]], dtype=np.int32)}
    (found,) = ask_tensors(served[0], "ensemble", halves | asked | {"exclude_input_in_output": np.array([[False]])})
    assert found["text_output"].flat[0].decode() == tokenizer.decode(ids) + text  # rows have no text
    ask(served[0], "ensemble", prompt_embedding_table=halves["prompt_embedding_table"])  # its shape says how many rows
    with pytest.raises(
        Exception, match="prompt_embedding_table has 10 rows, the limit of this engine is 9 per request"
    ):
        ask(
            served[0],
            "ensemble",
            prompt_embedding_table=np.zeros((1, 10, 256), dtype=np.float16),
            prompt_vocab_size=np.array([[10]], dtype=np.int32),
        )
    with pytest.raises(Exception, match="prompt_table_extra_id came without prompt_embedding_table"):
        ask(served[0], "ensemble", **extra)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_logits_are_those_of_transformers(served: tuple[Server, str], model: str) -> None:
    both = {"return_context_logits": np.array([[True]]), "return_generation_logits": np.array([[True]])}
    (whole,) = ask(served[0], model, **both)
    streamed = ask(served[0], model, stream=True, **both)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = tokenizer.encode(PROMPT).ids
    with torch.no_grad():
        made = reference.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0]
        logits = reference(made.unsqueeze(0)).logits[0].numpy()
    assert whole["generation_logits"].shape == (1, 1, NEW, logits.shape[1])
    np.testing.assert_allclose(whole["context_logits"][0], logits[: len(ids)], atol=1e-3)
    np.testing.assert_allclose(whole["generation_logits"][0, 0], logits[len(ids) - 1 : -1], atol=1e-3)
    rows = [each["generation_logits"] for each in streamed if "generation_logits" in each]
    np.testing.assert_allclose(np.concatenate(rows, axis=2), whole["generation_logits"], atol=1e-3)
    assert [each["context_logits"].shape for each in streamed if "context_logits" in each] == [
        (1, *logits[: len(ids)].shape)
    ]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_return_all_beams(served: tuple[Server, str], model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    made = reference.generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, num_beams=3, num_return_sequences=3,
        length_penalty=0.0, early_stopping=True,
    )  # fmt: skip
    before = len(tokenizer.decode(ids))
    expected = [tokenizer.decode(row.tolist())[before:] for row in made]

    def texts(**more: np.ndarray) -> list[str]:
        (found,) = ask(served[0], model, beam_width=np.array([[3]], dtype=np.int32), **more)
        return [text.decode() for text in found["text_output"][0]]

    assert texts() == expected
    assert texts(num_return_sequences=np.array([[2]], dtype=np.int32)) == expected[:2]
    assert texts(stop_words=np.array([["zebra"]], dtype=object)) == expected
    with pytest.raises(Exception, match="beam_width is 4; it must be a whole number from 1 to 3"):
        ask(served[0], model, beam_width=np.array([[4]], dtype=np.int32))
