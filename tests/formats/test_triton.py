"""The models' tensors and names, release by release."""

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity, Manifest
from trtforge.formats.releases import release
from trtforge.formats.triton import (
    ROLES,
    DtypeChoices,
    RepositoryFacts,
    newest_release,
    parameters,
    read_facts,
    target_release,
    tensors,
    text_flow,
)

RELEASES = ("0.17.0", "0.18.2", "0.19.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1")


@pytest.mark.parametrize("version", RELEASES)
def test_every_name_that_a_step_passes_on_is_declared(version: str) -> None:
    """What the ensemble hands over is an output of the one model and an input of the next."""
    wanted, flow = release(version), text_flow(release(version))
    names = {
        (role, direction): {tensor.name for tensor in tensors(role, direction, wanted, DtypeChoices())}
        for role in ROLES
        for direction in ("inputs", "outputs")
    }
    for ours, theirs in flow.text_to_preprocessing:
        assert ours in names["ensemble", "inputs"]
        assert theirs in names["preprocessing", "inputs"]
    for ours, theirs in flow.preprocessing_to_engine:
        assert ours in names["preprocessing", "outputs"]
        assert theirs in names["tensorrt_llm", "inputs"]
    for _, theirs in flow.text_to_engine:
        assert theirs in names["tensorrt_llm", "inputs"]
    for ours, theirs in flow.engine_to_text:
        assert ours in names["tensorrt_llm", "outputs"]
        assert theirs in names["ensemble", "outputs"]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("role", ROLES)
def test_no_data_type_is_left_open(version: str, role: str) -> None:
    for direction in ("inputs", "outputs"):
        for tensor in tensors(role, direction, release(version), DtypeChoices()):  # type: ignore[arg-type]
            assert tensor.dtype.startswith("TYPE_"), tensor
            assert tensor.dims, tensor


def test_renamed_inputs_follow_the_release() -> None:
    old = {tensor.name for tensor in tensors("ensemble", "inputs", release("0.19.0"), DtypeChoices())}
    new = {tensor.name for tensor in tensors("ensemble", "inputs", release("0.20.0"), DtypeChoices())}
    assert old - new == {"min_length", "random_seed"}
    assert new - old == {"min_tokens", "seed"}


def test_later_declaration_of_a_tensor_replaces_the_earlier() -> None:
    choices = DtypeChoices(prompt_table="TYPE_BF16")
    types = {
        version: next(
            tensor.dtype
            for tensor in tensors("tensorrt_llm", "inputs", release(version), choices)
            if tensor.name == "prompt_embedding_table"
        )
        for version in ("1.0.0", "1.1.0")
    }
    assert types == {"1.0.0": "TYPE_FP16", "1.1.0": "TYPE_BF16"}


def test_keys_that_the_backend_reads_unguarded_are_required() -> None:
    required = {parameter.key for parameter in parameters("tensorrt_llm", newest_release()) if parameter.required}
    assert {"tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend", "gpt_model_type"} <= required
    assert "tokenizer_dir" not in {parameter.key for parameter in parameters("tensorrt_llm", release("0.18.2"))}


def test_facts_survive_the_manifest() -> None:
    facts = RepositoryFacts(
        backend="torch", device="cpu", tensorrt_llm="1.2.1", world_size=1, prefix="a-", engine_path="engine"
    )
    identity = Identity(stage="repository", config={"repository": facts.model_dump(mode="json")})
    assert read_facts(Manifest(identity=identity, files={})) == facts
    assert facts.model("tensorrt_llm_bls") == "a-tensorrt_llm_bls"


def test_manifest_without_facts_is_refused() -> None:
    with pytest.raises(ForgeError, match="does not describe the repository"):
        read_facts(Manifest(identity=Identity(stage="repository"), files={}))
    config = {"repository": {"backend": "torch", "instances": 1}}
    old = Identity(stage="repository", config=config, versions={"trtforge": "0.0.9"})
    with pytest.raises(ForgeError, match=r"unknown key instances.*: trtforge 0\.0\.9 packaged it$") as caught:
        read_facts(Manifest(identity=old, files={}))
    assert caught.value.hint == "Run `trtforge package` again."


def test_only_the_embedded_engine_may_target_a_release_without_engines() -> None:
    assert target_release("1.3.0", embedded=True) == newest_release()
    assert target_release("0.17.0", embedded=True) == target_release("0.17.0", embedded=False)
    with pytest.raises(ForgeError, match=r"TensorRT-LLM 1\.3\.0 has no TensorRT engines"):
        target_release("1.3.0", embedded=False)
    for unknown in ("abc", "0.16.5"):
        with pytest.raises(ForgeError, match=f"TensorRT-LLM {unknown} is not a known release"):
            target_release(unknown, embedded=True)
