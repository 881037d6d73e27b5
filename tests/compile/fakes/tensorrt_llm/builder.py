import copy
import json
import os
import time

from tensorrt_llm.control import SITE, behaviour, note
from tensorrt_llm.logger import logger


class BuildConfig:
    def __init__(self, values):
        self.values = values

    @classmethod
    def from_dict(cls, config, plugin_config=None):
        """Refuses what the release does not have, wherever it stands; the real one skips it in silence."""
        schema = json.loads((SITE / "schema.json").read_text())
        sections = (
            ("build_config", config),
            ("plugin_config", config["plugin_config"]),
            ("lora_config", config["lora_config"]),
        )
        for section, values in sections:
            unknown = sorted(set(values) - set(schema[section]))
            if unknown:
                raise TypeError(f"{section} got an unexpected key: {', '.join(unknown)}")
        for key in schema["required"]:
            config[key]
        return cls(copy.deepcopy(config))

    @classmethod
    def from_json_file(cls, config_file, plugin_config=None):
        with open(config_file) as file:
            return cls.from_dict(json.load(file), plugin_config=plugin_config)


class EngineConfig:
    def __init__(self, pretrained_config, build_config, version):
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version

    def to_dict(self):
        values = self.build_config.values
        if tuple(map(int, self.version.partition("+")[0].split(".")[:2])) >= (1, 2):
            # From 1.2 on KVCacheType is a str enumeration, which JSON writes by its value.
            values = {**values, "kv_cache_type": values["kv_cache_type"].lower()}
        return {
            "version": self.version,
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": values,
        }


class Engine:
    def __init__(self, config, engine, managed_weights=None):
        self.config, self.engine, self.managed_weights = config, engine, managed_weights or {}

    def save(self, engine_dir):
        os.makedirs(engine_dir, exist_ok=True)
        rank = self.config.pretrained_config.mapping.rank
        note("save", engine_dir=engine_dir, rank=rank)
        if rank == 0:
            with open(os.path.join(engine_dir, "config.json"), "w", encoding="utf-8") as file:
                json.dump(self.config.to_dict(), file, indent=4)
        with open(os.path.join(engine_dir, f"rank{rank}.engine"), "wb") as file:
            file.write(self.engine)
        for name, text in (behaviour("writes_too", rank) or {}).items():
            path = os.path.join(engine_dir, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)


def build(model, build_config):
    rank, config = model.config.mapping.rank, copy.deepcopy(build_config)
    note("build", rank=rank, build_config=config.values)
    (SITE / f"begun-{rank}").touch()
    logger.info("Build TensorRT engine Unnamed Network 0")
    config.values["plugin_config"]["dtype"] = model.config.dtype
    config.values["plugin_config"]["paged_state"] = False
    _wait_for(behaviour("waits_for", rank))
    said = behaviour("fails", rank)
    if said is not None:
        print(said, flush=True)
        raise RuntimeError("Engine building failed, please check the error log.")
    if behaviour("kills_itself", rank):
        os.kill(os.getpid(), 9)
    for path, value in (behaviour("changes", rank) or {}).items():
        *parents, last = path.split(".")
        found = config.values
        for parent in parents:
            found = found[parent]
        found[last] = value
    _time_kernels(rank, config)
    version = behaviour("version", rank) or json.loads((SITE / "schema.json").read_text())["version"]
    size = 0 if behaviour("empty", rank) else 1
    return Engine(EngineConfig(model.config, config, version), (b"engine of " + model.weights) * size)


def _wait_for(name):
    """Until this file is in the site: `begun-1` comes when the build of rank 1 begins, `never` does not come."""
    while name is not None and not (SITE / name).exists():
        time.sleep(0.01)


def _time_kernels(rank, config):
    """Timings are read where the file is, and written by rank 0 alone."""
    given, timings = config.values["input_timing_cache"], b""
    if given is not None and os.path.exists(given):
        with open(given, "rb") as file:
            timings = file.read()
    note("timings", rank=rank, read=timings.decode())
    if config.values["output_timing_cache"] is not None and rank == 0:
        with open(config.values["output_timing_cache"], "wb") as file:
            file.write(timings + b"timed ")
