from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.families import TINY
from tests.runtime.checkpoints import tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import Families, Family
from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.native import bindings
from trtforge.runtime.native.bindings import Native


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from more, and lose much where cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[Native]:
    """The kernels of each level of instructions, in the place of this machine's."""
    found = kernels_at(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "_native", lambda: found)
        yield found


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 131, (length,), generator=generator).tolist() for length in (5, 17, 40, 1, 33, 64, 16, 90)]


@pytest.fixture(scope="session")
def checkpoint(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(llama, tmp_path_factory.mktemp("checkpoint") / "out")


@pytest.fixture(scope="session")
def engine_directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(checkpoint, tmp_path_factory.mktemp("engine") / "out")


@pytest.fixture(scope="session")
def expected(llama: LlamaForCausalLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What transformers generates greedily: 24 tokens for every prompt."""
    return greedy(llama, prompts, 24)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Tiny models by name, each made once."""
    made: dict[str, Family] = {}

    def family(name: str) -> Family:
        if name not in made:
            made[name] = Family(TINY[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return family


def greedy(model: PreTrainedModel, prompts: list[list[int]], tokens: int, **more: object) -> list[tuple[int, ...]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )
        answers.append(tuple(made[0, len(prompt) :].tolist()))
    return answers
