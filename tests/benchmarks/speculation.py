"""Speed of speculation by n-grams and by lookahead: `python -m tests.benchmarks.speculation [DIRECTORY]`.

`cyclic`: a Llama of 200 M parameters whose next token depends on its last one alone, so that all drafts are right;
`demo`: the demo model, which continues passages that its prompt holds twice; `demo once`: passages that it holds once.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.benchmarks.decode import SHAPE, run_trtforge
from tests.benchmarks.synthetic import write_model
from trtforge.core.assets import asset_directory
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.tokenizer import load_tokenizer
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with

NEW_TOKENS, PASSAGE, CYCLE, BATCHES, RUNS = 96, 150, 32, (1, 8), 5
_EVERY = 400


@dataclass(frozen=True)
class Compared:
    """Tokens a second at a number of requests, medians of runs in turns. `acceptance`: of the draft tokens."""

    model: str
    batch: int
    way: str
    plain: float
    drafted: float
    acceptance: float

    @property
    def times(self) -> float:
        """How many times as fast as without."""
        return self.drafted / self.plain


def measure(directory: Path, runs: int = RUNS) -> list[Compared]:
    """Both models, all ways."""
    write_model(directory / "cyclic", SHAPE)
    make_cyclic(directory / "cyclic")
    rng = random.Random(0)
    cyclic = [tuple(_cycle(rng.randrange(SHAPE.vocab)) * 4) for _ in range(max(BATCHES))]
    demo = asset_directory("recipes") / "demo-model"
    ids = load_tokenizer(demo / "tokenizer.json").encode((demo / "heldout.txt").read_text()).ids
    passages = [ids[start : start + PASSAGE] for start in range(0, _EVERY * max(BATCHES), _EVERY)]
    twice = [tuple([*passage, *passage, *passage[: PASSAGE // 5]]) for passage in passages]
    return [
        *compare(directory, "cyclic", directory / "cyclic", cyclic, runs),
        *compare(directory, "demo", demo, twice, runs),
        *compare(directory, "demo once", demo, [tuple(passage) for passage in passages], runs),
    ]


def make_cyclic(model: Path) -> None:
    """Let attention and MLP add nothing, and the logits depend on the last token: each is followed by the next one of
    its group of CYCLE tokens. The work stays the same."""
    following = torch.tensor([_cycle(token)[1] for token in range(SHAPE.vocab)])
    for path in sorted(model.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif "norm" in name:
                tensor.fill_(1)
        table = torch.randn(SHAPE.vocab, SHAPE.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"] = table
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = torch.empty_like(table).index_copy_(0, following, table)
        save_file(tensors, path)


def compare(directory: Path, name: str, model: Path, prompts: list[tuple[int, ...]], runs: int) -> list[Compared]:
    """One model without and with speculation, in turns."""
    checkpoint = directory / f"{name}-checkpoint"
    run_trtforge("convert", str(model), str(checkpoint))
    engines = {}
    for way, words in (
        ("plain", ()),
        ("n-grams", ("--feature", "ngram.draft_tokens=8", "--feature", "ngram.matching=3")),
        ("lookahead", ("--feature", "lookahead")),
    ):
        limits = ("--max-batch-size", "8", "--max-seq-len", "1024", "--compute-dtype", "bfloat16")
        run_trtforge("compile", str(checkpoint), str(directory / f"{name}-{way}"), "--device", "cpu", *limits, *words)
        engines[way] = Engine.load(directory / f"{name}-{way}", EngineOptions(kv_reuse=False))
    found = []
    for batch in BATCHES:
        rates: dict[str, list[float]] = {way: [] for way in engines}
        for _ in range(runs + 1):
            for way, engine in engines.items():
                rates[way].append(rate(engine, prompts[:batch]))
        medians = {way: statistics.median(values[1:]) for way, values in rates.items()}
        for way, engine in list(engines.items())[1:]:
            status = engine.statistics()
            acceptance = status.accepted_tokens / max(1, status.drafted_tokens)
            found.append(Compared(name, batch, way, medians["plain"], medians[way], acceptance))
    for engine in engines.values():
        engine.close()
    return found


def rate(engine: Engine, prompts: list[tuple[int, ...]]) -> float:
    """Tokens a second after the first ones."""
    times = []
    for new in (1, NEW_TOKENS):
        start = time.perf_counter()
        made = generate_with(engine, [GenerationRequest(str(i), prompt, new) for i, prompt in enumerate(prompts)])
        times.append(time.perf_counter() - start)
    return sum(len(each.tokens) - 1 for each in made) / (times[1] - times[0])


def _cycle(token: int) -> list[int]:
    first = token // CYCLE * CYCLE
    return [first + (token + step) % CYCLE for step in range(CYCLE)]


def main() -> None:
    """Print a line for each model and number of requests."""
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        for each in measure(Path(sys.argv[1] if len(sys.argv) > 1 else directory)):
            print(
                f"{each.model}, {each.batch} in flight: {each.plain:.0f} tokens/s, {each.way} {each.drafted:.0f}, "
                f"{each.times:.2f} times as fast, {each.acceptance:.0%} of the drafts accepted"
            )


if __name__ == "__main__":
    main()
