"""The facts of well-known models are those of the models: their parameters add up to what the hub says."""

from pathlib import Path

import pytest

from tests.plan.models import known
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.models.linear_attention import state_bytes
from trtforge.pipeline.summary import parameters as planned_parameters
from trtforge.plan.known import known_config, known_ids
from trtforge.plan.kv import bytes_per_token
from trtforge.plan.model import find_model

# Parameters as the hub counts them, a tied output head once.
PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "Qwen/Qwen1.5-14B": 14_167_290_880,
    "Qwen/Qwen1.5-32B": 32_512_218_112,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-27b-it": 27_009_346_304,  # without its vision part
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
}


@pytest.mark.parametrize(("hub_id", "parameters"), PARAMETERS.items())
def test_parameters_add_up(hub_id: str, parameters: int) -> None:
    model = known(hub_id)
    weights = model.whole("float16")
    blocks = [weights.first, *(weights.kinds[kind] for kind in weights.layers), weights.last]
    head = sum(matrix.weights for matrix in weights.last.matrices) if model.facts.tied_embeddings else 0
    router = sum(m.weights for block in blocks for m in block.matrices if m.itemsize == 4)  # float32: counted twice
    count = sum(sum(m.weights * m.itemsize for m in block.matrices) + block.other for block in blocks) // 2
    assert count - router - head == parameters


def test_the_parameters_of_deepseek_r1_add_up() -> None:
    """671,026,419,200 without the layer for multi-token prediction; a bias of each expert's choice is float32."""
    model = known("deepseek-ai/DeepSeek-R1")
    weights = model.whole("bfloat16")
    blocks = [weights.first, *(weights.kinds[kind] for kind in weights.layers), weights.last]
    matrices = sum(matrix.weights for block in blocks for matrix in block.matrices)
    biases = 58 * 256
    assert matrices + (sum(block.other for block in blocks) - 4 * biases) // 2 + biases == 671_026_419_200


@pytest.mark.parametrize(
    ("hub_id", "parameters"),
    [("openai/gpt-oss-20b", 20_914_757_184), ("openai/gpt-oss-120b", 116_829_156_672)],
)
def test_the_parameters_of_gpt_oss_add_up(hub_id: str, parameters: int) -> None:
    assert planned_parameters(known(hub_id)) == parameters


@pytest.mark.parametrize(
    ("hub_id", "parameters"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108_641_793_536),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 401_583_781_376),
    ],
)
def test_the_parameters_of_llama_4_add_up_with_its_vision_part(hub_id: str, parameters: int) -> None:
    assert known(hub_id).vision_bytes == 2 * 871_932_416
    assert planned_parameters(known(hub_id)) + 871_932_416 == parameters


def test_the_parameters_of_qwen3_next_add_up_with_its_mtp_layer() -> None:
    """81,324,862,720 on the hub, of which a layer of attention with experts and its own projection predicts a token."""
    model = known("Qwen/Qwen3-Next-80B-A3B-Instruct")
    attention = 2048 * (2 * 4096 + 2 * 512 + 4096) + 2 * 256
    experts = 512 * 3 * 2048 * 512 + 3 * 2048 * 512 + 2048 + 512 * 2048
    predictor = attention + experts + 2 * 2048 + 2 * 2048 * 2048 + 3 * 2048
    assert planned_parameters(model) + predictor == 81_324_862_720
    assert bytes_per_token(model.facts.sizes, 2) == 12 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state_bytes(model.facts.sizes, 2, Parallel()) == state
    assert state_bytes(model.facts.sizes, 2, Parallel(tp=2, pp=3), 1) == state // 6


def test_every_known_model_has_a_family_and_is_found_whatever_its_case() -> None:
    assert len(known_ids()) > 40
    for hub_id in known_ids():
        assert known(hub_id).facts.sizes.num_layers > 0
        assert known_config(hub_id.upper()) is not None


def test_a_directory_of_that_name_is_looked_at_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(ForgeError, match=r"config\.json"):
        find_model("Qwen/Qwen3-8B")
