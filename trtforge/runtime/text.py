"""Text generation with an engine directory and its tokenizer: `trtforge generate`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError
from trtforge.core.stop_text import StopText
from trtforge.core.verified import open_to_run
from trtforge.engine_process.requests import GenerationRequest, Guide, SamplingParams
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.special_tokens import read_special_tokens, require_end_ids
from trtforge.formats.tokenizer import load_tokenizer
from trtforge.runtime.engine import EngineOptions
from trtforge.runtime.generate import generate
from trtforge.runtime.ranks.source import open_engine

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class GeneratedText:
    """The generated text; `tokens`: its ids, possibly with more after a stop word.

    `seconds`: includes loading the engine.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    seconds: float


def generate_text(
    directory: Path,
    prompt: str,
    *,
    max_tokens: int,
    sampling: SamplingParams,
    stop: tuple[str, ...] = (),
    guide: Guide | None = None,
    trace: Path | None = None,
) -> GeneratedText:
    """Load the engine, answer one prompt, close it. `trace`: a file to which every iteration is written.

    The text ends before the first string of `stop`.

    Raises ForgeError if the engine cannot be loaded, a file does not match the manifest, or the prompt is refused.
    """
    source = open_engine(directory)
    vocab_size, features = source.config.vocab_size, source.forge.features
    open_to_run(directory, "engine")
    tokenizer = _tokenizer(directory)
    require_end_ids(directory / TOKENIZER_DIRECTORY, vocab_size)
    ids = tokenizer.encode(prompt).ids
    request = GenerationRequest(
        request_id="0",
        prompt=tuple(ids),
        max_tokens=max_tokens,
        sampling=sampling,
        end_ids=frozenset(read_special_tokens(directory / TOKENIZER_DIRECTORY).end_ids),
        stop_words=tuple(tuple(tokenizer.encode(word, add_special_tokens=False).ids) for word in stop),
        guide=guide,
    )
    start = time.perf_counter()
    options = EngineOptions(kv_reuse=features.kv_reuse, chunked_context=features.chunked_context, trace=trace)
    (answer,) = generate(directory, [request], options)
    if answer.error is not None:
        raise answer.error
    # Decoded with the prompt: a tokenizer may put the space between words into either token.
    before = tokenizer.decode(ids)
    text = tokenizer.decode([*ids, *answer.tokens])[len(before) :]
    ending = StopText(stop)  # the engine handles only those that tokenize in context as they do alone
    text = ending.push(text) + ending.flush()
    reason = "stop_word" if ending.found else answer.finish_reason
    return GeneratedText(text, answer.tokens, reason, time.perf_counter() - start)


def _tokenizer(directory: Path) -> "Tokenizer":
    path = directory / TOKENIZER_DIRECTORY / "tokenizer.json"
    if not path.is_file():
        raise ForgeError(
            f"{directory} has no tokenizer ({TOKENIZER_DIRECTORY}/tokenizer.json)",
            hint="Convert from a checkpoint directory that has tokenizer.json, then compile again.",
        )
    return load_tokenizer(path)
