import json
from pathlib import Path

from tests.compile.checkpoints import llama
from trtforge.core.parallel import Parallel
from trtforge.formats.trtllm import read_engine_config

MAPPING = {
    **Parallel(tp=2).mapping(),
    "rank": 0,
    "moe_cluster_size": 1,
    "attn_tp_size": 2,
    "attn_cp_size": 1,
    "cp_config": {},
    "enable_attention_dp": False,
    "enable_lm_head_tp_in_adp": False,
}
"""As `to_dict` in tensorrt_llm/mapping.py of 1.2 writes it."""


def test_the_mapping_of_an_engine_of_1_2_is_read(tmp_path: Path) -> None:
    model = llama(mapping=MAPPING).model_dump(mode="json")
    (tmp_path / "config.json").write_text(
        json.dumps({"version": "1.2.1", "pretrained_config": model, "build_config": {}})
    )
    read, _ = read_engine_config(tmp_path)
    assert read.mapping == MAPPING
    assert read.parallel == Parallel(tp=2)
