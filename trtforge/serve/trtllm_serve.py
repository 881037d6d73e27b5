"""NVIDIA's own server of the LLM API, for releases without a Triton image: trtllm-serve in TensorRT-LLM's image.

It serves OpenAI's API but not Triton's, so trtforge only prints its command or a batch script. Sources: TensorRT-LLM's
quick-start guide (docker options), tests/unittest/api_stability/references/ trtllm_serve_cli.yaml (options),
examples/llm-api/llm_mgmn_trtllm_serve.sh (trtllm-llmapi-launch).
"""

import shlex
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.llmapi import SERVE_FILE, read_llm_args
from trtforge.formats.releases import release_image
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.containers import STACK_BYTES, mountable
from trtforge.launch.rank_commands import nodes_of, packaged_root
from trtforge.serve.config import ServeConfig
from trtforge.serve.slurm import batch_header

_LIMITS = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
"""Options that are named like their arguments of the LLM API."""


def require_llm_api_repository(config: ServeConfig, facts: RepositoryFacts) -> None:
    """Raises ForgeError for a repository of another backend, and for options that this server lacks."""
    if facts.backend != "llmapi":
        raise ForgeError(
            f"--launcher trtllm-serve cannot serve backend {facts.backend}: trtllm-serve runs only the LLM API",
            hint="Use --launcher auto, or compile for `--backend llmapi`.",
        )
    if config.api_key_file is not None:
        raise ForgeError(
            "--launcher trtllm-serve does not support --api-key-file: trtllm-serve checks no keys",
            hint="Put a gateway that checks keys in front of it.",
        )


def docker_command(config: ServeConfig, repository: Path, facts: RepositoryFacts, name: str) -> tuple[str, ...]:
    """The command that runs the server in TensorRT-LLM's image; the server itself starts one process per GPU."""
    return (
        *("docker", "run", "--rm", "--name", name),
        *("--gpus", "all", "--network", "host", "--ipc", "host"),
        *("--ulimit", "memlock=-1", "--ulimit", f"stack={STACK_BYTES}"),
        *("--volume", f"{mountable(repository)}:{packaged_root(facts)}:ro"),
        release_image(facts.tensorrt_llm),
        *serve_command(config, repository, facts),
    )


def serve_command(config: ServeConfig, repository: Path, facts: RepositoryFacts) -> tuple[str, ...]:
    """trtllm-serve with the arguments that were packaged.

    The limits are also options, because TensorRT-LLM 1.0 prefers the options' defaults to the file
    (tensorrt_llm/llmapi/llm_args.py, `set_runtime_knobs_from_build_config`).
    """
    directory = Path(facts.engine_path).parent
    args = read_llm_args(repository / directory.relative_to(packaged_root(facts)))
    limits = {name: getattr(args, name) for name in _LIMITS}
    return (
        *("trtllm-serve", facts.engine_path),
        *("--host", config.host, "--port", str(config.http_port)),
        *(word for name, value in limits.items() if value is not None for word in (f"--{name}", str(value))),
        *("--extra_llm_api_options", str(directory / SERVE_FILE)),
        *(("--reasoning_parser", config.reasoning_parser) if config.reasoning_parser is not None else ()),
    )


def batch_script(config: ServeConfig, repository: Path, facts: RepositoryFacts) -> str:
    """The text of a script for `sbatch`: one task per GPU, the first of which listens."""
    registry, _, image = release_image(facts.tensorrt_llm).partition("/")
    srun = ("srun", "--mpi=pmix", "--kill-on-bad-exit=1")
    container = (
        f"--container-image={registry}#{image}",
        f"--container-mounts={mountable(repository, ':,')}:{packaged_root(facts)}:ro",
    )
    command = f"trtllm-llmapi-launch {shlex.join(serve_command(config, repository, facts))}"
    words = (*srun, *map(shlex.quote, container), command)
    return "\n".join([*batch_header(facts.world_size, nodes_of(config)), "", " \\\n  ".join(words), ""])
