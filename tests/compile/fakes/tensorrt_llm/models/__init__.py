import json
import os

from tensorrt_llm.control import note


class Mapping:
    def __init__(self, values):
        self.values, self.rank = values, 0
        self.world_size = values["world_size"]

    def to_dict(self):
        """As tensorrt_llm/mapping.py of 1.2 writes it."""
        return {
            **self.values,
            "rank": self.rank,
            "moe_cluster_size": 1,
            "attn_tp_size": self.values["tp_size"],
            "attn_cp_size": 1,
            "cp_config": {},
            "enable_attention_dp": False,
        }


class PretrainedConfig:
    def __init__(self, values):
        self.values = values
        self.architecture, self.dtype = values["architecture"], values["dtype"]
        self.mapping = Mapping(values["mapping"])

    @classmethod
    def from_json_file(cls, config_file):
        with open(config_file) as file:
            return cls(json.load(file))

    def set_rank(self, rank):
        assert 0 <= rank < self.mapping.world_size
        self.mapping.rank = rank

    def to_dict(self):
        return {**self.values, "mapping": self.mapping.to_dict()}


class LLaMAForCausalLM:
    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        if config is None:
            config = PretrainedConfig.from_json_file(os.path.join(ckpt_dir, "config.json"))
        if rank is not None:
            config.set_rank(rank)
        rank = config.mapping.rank
        note("from_checkpoint", ckpt_dir=ckpt_dir, rank=rank)
        with open(os.path.join(ckpt_dir, f"rank{rank}.safetensors"), "rb") as file:
            return cls(config, file.read())


MODEL_MAP = {"LlamaForCausalLM": LLaMAForCausalLM}
