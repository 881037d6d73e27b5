"""Memory of features against figures worked out by hand for Llama 3.1 8B: hidden 4096, 8 KV heads of 128, 32 layers,
14336 inner units, 128256 tokens, 2 bytes a weight."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.models import LLAMA_8B, LLAMA_70B, asked, known
from trtforge.core.features import LoraFeature, LoraModule, MedusaFeature
from trtforge.core.parallel import Parallel
from trtforge.plan.drafting import medusa_bytes
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.gpus import gpu_named
from trtforge.plan.lora import adapter_bytes, cache_bytes, module_values, workspace_bytes
from trtforge.plan.memory import RankMemory

ALL: tuple[LoraModule, ...] = (
    "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
)  # fmt: skip
SIZES = known(LLAMA_8B).facts.sizes
MIB = 1 << 20


def planned(hub_id: str = LLAMA_8B, features: dict[str, Any] | None = None, **options: Any) -> Evaluation:
    model = known(hub_id)
    engine = {"backend": "tensorrt_llm", "max_batch_size": 8, "max_seq_len": 4096, "features": features or {}}
    serving = options.pop("serving", {})
    return evaluate(model, asked(model, recipe={"engine": engine, "serving": serving}, dtype="float16", **options))


def last(evaluation: Evaluation) -> RankMemory:
    assert evaluation.memory is not None
    return evaluation.memory.stages[-1]


@pytest.mark.parametrize(
    ("module", "tp1", "tp2"),
    [
        ("attn_q", 4096 + 4096, 4096 + 2048),
        ("attn_k", 4096 + 1024, 4096 + 512),
        ("attn_qkv", 4096 + 6144, 4096 + 3072),
        ("attn_dense", 4096 + 4096, 2048 + 4096),
        ("mlp_gate", 4096 + 14336, 4096 + 7168),
        ("mlp_4h_to_h", 14336 + 4096, 7168 + 4096),
    ],
)
def test_sizes_of_a_lora_module(module: LoraModule, tp1: int, tp2: int) -> None:
    assert module_values(SIZES, Parallel(), module) == tp1
    assert module_values(SIZES, Parallel(tp=2), module) == tp2


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [(Parallel(), 335_544_320), (Parallel(tp=2), 226_492_416), (Parallel(pp=2), 167_772_160)],
)
def test_an_adapter_takes_its_rank_times_inputs_and_outputs(parallel: Parallel, expected: int) -> None:
    assert adapter_bytes(SIZES, parallel, LoraFeature(max_rank=64, modules=ALL), 2) == expected


def test_an_adapter_takes_whole_rows_of_the_cache() -> None:
    """1 x 18432 x 32 values in rows of 5120: 115.2 rows are 116."""
    odd = LoraFeature(max_rank=1, modules=("attn_k", "attn_dense", "attn_k"))
    assert adapter_bytes(SIZES, Parallel(), odd, 2) == 116 * 5120 * 2


@given(
    rank=st.integers(1, 512),
    modules=st.lists(st.sampled_from(ALL), min_size=1, unique=True),
    tp=st.sampled_from([1, 2, 4, 8, 16, 32]),
    pp=st.sampled_from([1, 2, 4]),
)
def test_an_adapter_never_takes_less_than_its_values_nor_a_row_more(
    rank: int, modules: list[LoraModule], tp: int, pp: int
) -> None:
    parallel = Parallel(tp=tp, pp=pp)
    values = [module_values(SIZES, parallel, module) for module in modules]
    exact = rank * sum(values) * 32 // pp * 2
    taken = adapter_bytes(SIZES, parallel, LoraFeature(max_rank=rank, modules=tuple(modules)), 2)
    assert exact <= taken < exact + 2 * min(values)


def test_the_workspace_holds_query_key_and_value_of_a_step() -> None:
    assert workspace_bytes(LoraFeature(max_rank=64, modules=ALL), 8192, 2) == 8192 * 3 * 64 * 2
    assert workspace_bytes(LoraFeature(max_rank=64, modules=("attn_dense",)), 8192, 2) == 8192 * 64 * 2


def test_the_adapter_cache_is_a_share_of_what_the_kv_pool_leaves() -> None:
    lora = {"max_rank": 16, "gpu_fraction": 0.25, "host_memory": 5 << 30}
    found = planned(features={"lora": lora}, gpu="h100-80gb", serving={"kv_cache_fraction": 0.5})
    rank = last(found)
    work = 8192 * 3 * 16 * 2
    left = int(gpu_named("h100-80gb").memory) - (rank.total - rank.lora + work)
    assert found.legal
    assert rank.lora == work + int(0.25 * left)
    assert rank.host == 5 << 30
    assert rank.total < gpu_named("h100-80gb").memory
    assert cache_bytes(LoraFeature(), -5) == 0


def test_a_cache_that_holds_no_adapter_is_refused_with_one_that_does() -> None:
    """The server would end with `Not enough space allocated to device LoRA cache to hold 1 max sized LoRA`."""
    lora: dict[str, Any] = {"max_rank": 64, "modules": list(ALL)}
    found = planned(features={"lora": lora}, gpu="h100-80gb", serving={"kv_cache_fraction": 0.95})
    (problem,) = found.problems
    assert problem.rule == "lora_cache"
    assert "is too small: an adapter of rank 64 takes 336 MB" in problem.message
    share = re.search(r"gpu_fraction ([0-9.]+),", problem.fix)
    assert share is not None
    mended = {"lora": lora | {"gpu_fraction": float(share[1])}}
    assert planned(features=mended, gpu="h100-80gb", serving={"kv_cache_fraction": 0.95}).legal
    small = planned(features={"lora": lora | {"host_memory": 100 * MIB, "gpu_fraction": 0.5}}, gpu="h100-80gb")
    (problem,) = small.problems
    assert problem.message.startswith("the host's adapter cache of 105 MB is too small")


def test_medusa_heads() -> None:
    """4 x (4096² + 4096 + 4096 x 128256) x 2 bytes."""
    assert medusa_bytes(SIZES, Parallel(), MedusaFeature(), 2) == 4_336_943_104
    assert medusa_bytes(SIZES, Parallel(tp=2), MedusaFeature(), 2) == 2_168_471_552
    found = last(planned(features={"medusa": True}))
    drafted, heads = 8 * 63 * 128_256 * 4, 4 * 8 * 64 * 128_256 * 4
    assert found.draft == 4_336_943_104 + drafted + heads
    assert found.kv_per_token == 131_072


def test_eagles_network_is_held_for_every_time_that_it_runs() -> None:
    """A layer of 218,112,000 weights, 2 x 4096² + 4096 that join, two tables of 128256 x 4096; and its own KV cache."""
    network = (218_112_000 + 33_558_528 + 2 * 525_336_576) * 2
    found = last(planned(features={"eagle": {"depth": 3}}))
    assert found.draft == 3 * network + 8 * 63 * 128_256 * 4
    assert found.kv_per_token == 131_072 + 2 * 8 * 128 * 2
    by_choices = {"eagle": {"choices": [[0], [0, 0], [0, 0, 0]], "draft_tokens": 3}}
    assert last(planned(features=by_choices)).draft == 3 * network + 8 * 3 * 128_256 * 4


def test_lookahead_takes_logits_alone() -> None:
    plain, found = planned(), planned(features={"lookahead": {"window": 7, "ngram": 7, "verification": 7}})
    assert last(found).draft == 8 * 83 * 128_256 * 4
    assert last(found).fixed - last(plain).fixed == last(found).draft


def test_a_draft_model_shares_the_gpus_and_the_pool() -> None:
    found = planned(LLAMA_70B, {"draft": {"tokens": 5, "model": LLAMA_8B}}, quant="fp8")
    rank = last(found)
    assert found.legal
    assert rank.draft == 16_060_522_496 + 8 * 5 * 128_256 * 4 + 8 * 128_256 * 4
    assert rank.kv_per_token == 327_680 + 131_072
    split = planned(LLAMA_70B, {"draft": {"model": LLAMA_8B}}, quant="fp8", tp=4)
    assert last(split).kv_per_token == (327_680 + 131_072) // 4
    assert 16_060_522_496 / 4 < last(split).draft - 8 * 6 * 128_256 * 4 < 1.2 * 16_060_522_496 / 4


def test_a_request_keeps_room_for_tokens_that_may_be_rejected() -> None:
    plain = planned(concurrency=4)
    found = planned(features={"lookahead": {"window": 7, "ngram": 7, "verification": 7}}, concurrency=4)
    assert plain.memory is not None
    assert found.memory is not None
    assert plain.memory.kv_tokens == 4 * 4096
    assert found.memory.kv_tokens == 4 * (4096 + 96)
    assert plain.full_length_requests == found.full_length_requests == 4


def test_weights_that_stream_are_in_host_memory() -> None:
    whole, found = planned(), planned(features={"weights_on_gpu": 0.25})
    assert found.memory is not None
    assert last(found).weights == last(whole).weights // 4
    assert last(found).host == last(found).streamed == last(whole).weights - last(whole).weights // 4
    assert found.memory.as_json()["weights"] == last(whole).weights


def test_logits_of_prompts_are_rows_of_a_whole_step() -> None:
    extra = last(planned(features={"context_logits": True})).logits - last(planned()).logits
    assert extra == 8192 * 128_256 * 4
    assert last(planned(features={"generation_logits": True})) == last(planned())


def test_prompt_tables_are_on_the_ranks_that_embed() -> None:
    found = planned(features={"max_prompt_embedding_table_size": 800}, pp=2).memory
    assert found is not None
    assert [stage.tables for stage in found.stages] == [800 * 4096 * 2, 0]
    whole = last(planned())
    assert last(planned(features={"max_prompt_embedding_table_size": 800})).fixed == whole.fixed + 800 * 4096 * 2


def test_parts_add_up_with_features() -> None:
    features = {"lora": {"max_rank": 8}, "draft": {"model": LLAMA_8B}, "weights_on_gpu": 0.5}
    found = planned(LLAMA_70B, features, gpu="h100-80gb", tp=4, quant="fp8")
    assert found.memory is not None
    memory = found.memory.as_json()
    parts = ("weights", "replicated", "kv_pool", "activations", "logits", "decoder", "runtime", "lora", "draft")
    assert memory["total"] == sum(memory[name] for name in parts) - memory["streamed"]
    gpu = ("weights", "kv_pool", "activations", "logits", "decoder", "runtime", "lora", "draft")
    assert memory["per_gpu"] == sum(memory["gpu"][name] for name in gpu)
