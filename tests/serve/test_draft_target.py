"""A draft engine packaged beside the target: clients send text, the text models drive both, Triton runs both."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.package.engines import FORGE, tensorrt_engine, write_engine
from tests.package.test_features import built
from tests.package.test_stage import model_config, parameters
from tests.serve.conftest import Running, start_server
from tests.serve.draft_target import following
from tests.serve.test_serving import post
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity, Manifest, open_artifact
from trtforge.core.recipe import load_recipe
from trtforge.core.serving import ServingConfig
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.client import Sampling, generate, stream_text
from trtforge.serve.config import ServeConfig
from trtforge.serve.launchers import plan_launch
from trtforge.serve.view import make_view

DRAFTS = 4
RELEASES = ("0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1")
PROMPT = "one two three"


def target(directory: Path, version: str = "1.2.1", tp: int = 1, tokens: int = DRAFTS) -> Path:
    features = built(draft={"tokens": tokens})
    return tensorrt_engine(directory / "target", tp, version, features=features, max_draft_len=DRAFTS)


def packaged(directory: Path, served: Path, draft: Path, **serving: Any) -> Path:
    values = {"draft_engine": str(draft), "kv_cache_tokens": 4096} | serving
    config = PackageConfig(serving=ServingConfig.parse(values, "serving"))
    return package(config, served, DEMO_MODEL, directory / "repository").path


def manifest_of(repository: Path) -> Manifest:
    return open_artifact(repository, "repository")


def facts_of(repository: Path) -> RepositoryFacts:
    return read_facts(manifest_of(repository))


def with_stand_ins(repository: Path, out: Path) -> Path:
    """The repository with models in Python in the place of TensorRT-LLM's backend, for the local launcher."""
    manifest = manifest_of(repository)
    config = json.loads(json.dumps(manifest.identity.config))
    config["repository"] |= {"backend": "torch", "device": "cpu", "engine_path": "engine"}

    def write(directory: Path) -> dict[str, Any]:
        shutil.copytree(repository, directory, dirs_exist_ok=True)
        for name in ("tensorrt_llm", "tensorrt_llm_draft"):
            shutil.copy(Path(__file__).parent / "draft_target.py", directory / name / "1" / "model.py")
            path = directory / name / "config.pbtxt"
            path.write_text(path.read_text().replace('backend: "tensorrtllm"', 'backend: "python"'))
        engine = directory / "tensorrt_llm" / "1" / "engine" / "config.json"
        engine.write_text(json.dumps(json.loads(engine.read_text()) | {"forge": FORGE | {"kernels": {}}}))
        (directory / "forge.json").unlink()
        return {}

    return produce(out, Identity(stage="repository", config=config), write).path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engine models were asked, a file each."""
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, asked: Path) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("draft-target")
    repository = packaged(directory, target(directory), tensorrt_engine(directory / "draft"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTFORGE_TESTS_ASKED", str(asked))
        server = start_server(with_stand_ins(repository, directory / "served"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def requests_of(asked: Path, model: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (asked / model).read_text().splitlines()]


def expected(count: int) -> str:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokens = tokenizer.encode(PROMPT).ids
    for _ in range(count):
        tokens.append(following(tokens))
    whole: str = tokenizer.decode(tokens)
    return whole.removeprefix(tokenizer.decode(tokens[:-count]))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_client_sends_text_and_gets_what_the_target_alone_says(running: Running, asked: Path, model: str) -> None:
    before = len(requests_of(asked, "tensorrt_llm")) if (asked / "tensorrt_llm").exists() else 0
    answer = generate(running.http, model, PROMPT, Sampling(max_tokens=20), protocol="http")
    assert (answer.text, answer.output_tokens) == (expected(20), 20)
    steps = requests_of(asked, "tensorrt_llm")[before:]
    assert max(len(step["offered"]) for step in steps) == DRAFTS
    assert all(step["count"] == len(step["offered"]) + 1 for step in steps)
    assert 4 <= len(steps) <= 10
    drafts = requests_of(asked, "tensorrt_llm_draft")
    assert {step["count"] for step in drafts} <= {1, 2, 3, 4}
    assert drafts[-1]["tokens"] == steps[-1]["tokens"] or not steps[-1]["offered"]


def test_it_streams_a_step_at_a_time(running: Running) -> None:
    pieces = list(stream_text(running.grpc, "tensorrt_llm_bls", PROMPT, Sampling(max_tokens=20)))
    assert len(pieces) > 1
    assert "".join(pieces) == expected(20)


@pytest.mark.parametrize(("drafts", "steps"), [(0, 1), (1, 10)])
def test_a_client_of_the_bls_model_chooses_the_draft_tokens(
    running: Running, asked: Path, drafts: int, steps: int
) -> None:
    before = len(requests_of(asked, "tensorrt_llm"))
    response = post(running, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=20, num_draft_tokens=drafts)
    assert (response.status_code, response.json()["text_output"]) == (200, expected(20))
    assert len(requests_of(asked, "tensorrt_llm")) - before >= steps
    assert all(len(step["offered"]) <= drafts for step in requests_of(asked, "tensorrt_llm")[before:])


def test_more_draft_tokens_than_the_engine_takes_are_refused(running: Running) -> None:
    response = post(running, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=20, num_draft_tokens=DRAFTS + 1)
    assert response.status_code == 400
    assert f"num_draft_tokens 5: the engine verifies 0 to {DRAFTS} draft tokens" in response.json()["error"]


def test_a_prompt_that_the_draft_engine_does_not_take_is_answered_all_the_same(running: Running, asked: Path) -> None:
    answer = generate(running.http, "ensemble", PROMPT, Sampling(max_tokens=90), protocol="http")
    assert (answer.text, answer.output_tokens) == (expected(90), 90)
    assert requests_of(asked, "tensorrt_llm")[-1]["count"] > DRAFTS + 1


@pytest.mark.parametrize("version", RELEASES)
def test_the_repository_of_a_release(version: str, tmp_path: Path) -> None:
    repository = packaged(tmp_path, target(tmp_path, version), tensorrt_engine(tmp_path / "draft", version=version))
    draft, served = model_config(repository, "tensorrt_llm_draft"), model_config(repository, "tensorrt_llm")
    assert (draft.name, draft.backend, served.backend) == ("tensorrt_llm_draft", "tensorrtllm", "tensorrtllm")
    paths = [parameters(config)["gpt_model_path"] for config in (served, draft)]
    assert paths == ["/models/tensorrt_llm/1/engine", "/models/tensorrt_llm_draft/1/engine"]
    assert {tensor.name for tensor in served.input} >= {"draft_input_ids", "draft_logits"}
    assert [parameters(c)["max_tokens_in_paged_kv_cache"] for c in (served, draft)] == ["4096", "4096"]
    for name in ("ensemble", "tensorrt_llm_bls"):
        found = parameters(model_config(repository, name))
        assert found["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
        assert found["num_draft_tokens"] == str(DRAFTS)
    bls = model_config(repository, "tensorrt_llm_bls")
    assert {tensor.name for tensor in bls.input} >= {"num_draft_tokens", "use_draft_logits"}
    assert (repository / "tensorrt_llm_draft" / "1" / "engine" / "rank0.engine").is_file()
    names = {theirs for _, _, theirs in (pair.partition(":") for pair in found["text_to_engine"].split(","))}
    declared = {tensor.name for tensor in draft.input}
    assert len(names & declared & {"min_tokens", "min_length"}) == 1
    assert len(names & declared & {"seed", "random_seed"}) == 1
    manifest = manifest_of(repository)
    assert str(tmp_path) not in manifest.to_json()
    assert manifest.identity.inputs["draft_engine"] != manifest.identity.inputs["engine"]


def test_the_text_models_ask_for_no_more_than_the_engine_verifies(tmp_path: Path) -> None:
    repository = packaged(tmp_path, target(tmp_path, tokens=9), tensorrt_engine(tmp_path / "draft"))
    assert parameters(model_config(repository, "ensemble"))["num_draft_tokens"] == str(DRAFTS)


def test_a_server_starts_both_and_leads_the_ranks_of_several(tmp_path: Path) -> None:
    draft = tensorrt_engine(tmp_path / "draft")
    one = packaged(tmp_path / "one", target(tmp_path / "one"), draft)
    assert (facts_of(one).orchestrated, facts_of(one).gpu_count) == (False, 1)
    two = packaged(
        tmp_path / "two", target(tmp_path / "two", tp=2), draft, draft_gpu_device_ids="2", kv_cache_tokens=None
    )
    assert (facts_of(two).orchestrated, facts_of(two).gpu_count) == (True, 3)
    assert parameters(model_config(two, "tensorrt_llm_draft"))["gpu_device_ids"] == "2"
    launch = plan_launch(ServeConfig(launcher="docker"), two, facts_of(two), Path("/tmp/trtforge-serve-1-x"))
    assert "TRTLLM_ORCHESTRATOR=1" in launch.describe()
    assert "tritonserver" in launch.argv
    view = tmp_path / "view"
    make_view(two, view, facts_of(two))
    for name in facts_of(two).engine_models:
        assert f'"{(two / name / "1").resolve()}/engine"' in (view / name / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({"kv_cache_tokens": None}, "both engines share a GPU, and each would take kv_cache_fraction"),
        ({"participant_ids": "1"}, "draft_engine with participant_ids is not supported"),
        ({"gpu_device_ids": "0;1"}, "draft_engine with several instances (gpu_device_ids) is not supported"),
        ({"draft_gpu_device_ids": "1,2"}, "draft_gpu_device_ids has 2 ids, the draft engine 1 ranks"),
        ({"draft_engine": None, "draft_gpu_device_ids": "1"}, "draft_gpu_device_ids: there is no draft_engine"),
    ],
)
def test_settings_that_do_not_fit_are_refused(serving: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError) as caught:
        packaged(tmp_path, target(tmp_path), tensorrt_engine(tmp_path / "draft"), **serving)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_build_directory_is_taken_for_its_engine(tmp_path: Path) -> None:
    tensorrt_engine(tmp_path / "build" / "engine")
    repository = packaged(tmp_path, target(tmp_path), tmp_path / "build")
    assert (repository / "tensorrt_llm_draft" / "1" / "engine" / "rank0.engine").is_file()


def test_engines_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    draft, served = tensorrt_engine(tmp_path / "draft"), target(tmp_path)
    plain = tensorrt_engine(tmp_path / "plain")
    with pytest.raises(ForgeError, match="draft_engine: the engine cannot verify draft tokens") as verifies:
        packaged(tmp_path, plain, draft)
    assert verifies.value.hint == "Compile it with engine.features.draft (--feature draft)."
    older = tensorrt_engine(tmp_path / "older", version="1.1.0")
    with pytest.raises(ForgeError, match=r"has TensorRT-LLM 1\.1\.0, the served engine 1\.2\.1"):
        packaged(tmp_path, served, older)
    values = json.loads((plain / "config.json").read_text())
    values["pretrained_config"]["vocab_size"] = 1000
    with pytest.raises(ForgeError, match=r"has a vocabulary of 1000, the served engine 2048"):
        packaged(tmp_path, served, write_engine(tmp_path / "small", values))
    with pytest.raises(ForgeError, match="is not an embedded engine, but the served engine is") as own:
        packaged(tmp_path, write_engine(tmp_path / "torch", values | {"forge": FORGE}), draft)
    assert own.value.hint == "Compile it with --backend torch."


def test_a_recipe_names_the_draft_engine_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    recipe = {"name": "x", "model": {"source": "m"}, "serving": {"draft_engine": "draft"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert load_recipe(tmp_path / "recipe.yaml").serving.draft_engine == str((tmp_path / "draft").resolve())
