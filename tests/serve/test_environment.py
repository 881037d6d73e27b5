"""What of the environment server processes get."""

import pytest

from trtforge.serve.environment import holds_secret, server_environment


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "MYAPIKEY"),
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "GITHUB_TOKEN"),
        *(
            "DB_PASSWORD",
            "PGPASSWORD",
            "CLIENT_SECRET",
            "SECRET_KEY_BASE",
            "WANDB_API_KEY",
            "NGC_API_KEY",
            "CI_JOB_TOKEN",
        ),
        *("SSH_AUTH_SOCK", "DATABASE_URL", "GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG_PASSWORD", "hf_token"),
    ],
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert holds_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        *("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "NCCL_DEBUG", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HF_HOME"),
        *("SLURM_JOB_ID", "UCX_TLS", "TLLM_LOG_LEVEL", "TRTLLM_MAX_NUM_TOKENS", "VIRTUAL_ENV", "PYTHONPATH", "KEYMAP"),
    ],
)
def test_what_a_server_needs_stays(name: str) -> None:
    assert not holds_secret(name)


def test_a_launch_adds_to_what_is_left() -> None:
    here = {"PATH": "/bin", "HF_TOKEN": "x", "A": "1"}
    assert server_environment({"PATH": "/opt/bin"}, here) == {"PATH": "/opt/bin", "A": "1"}
