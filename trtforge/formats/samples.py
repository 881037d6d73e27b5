"""Calibration samples that are tokenised on demand; the cache keeps the facts that identify them."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from trtforge import __version__
from trtforge.core.cache_records import keep_cached, read_cached
from trtforge.core.config_model import Config
from trtforge.core.digest import file_digest, text_digest
from trtforge.formats.corpus import TokenWindows, content_of, token_windows
from trtforge.formats.hf import CONFIG, tokenizer_files


class SampleFacts(Config):
    """Facts of windows of token ids, as in `TokenWindows`. `longest`: tokens of the longest window."""

    digest: str
    windows: int
    longest: int
    tokens: int
    documents: int
    document_lengths: dict[str, int]


@dataclass(frozen=True)
class Samples:
    """At most `count` windows of `length` tokens from `data`, for the tokenizer in the directory `model`."""

    data: str
    model: Path
    count: int
    length: int
    vocab_size: int
    seed: int

    @cached_property
    def windows(self) -> TokenWindows:
        """The samples themselves. Raises ForgeError as `token_windows` does."""
        return token_windows(
            self.data,
            self.model,
            samples=self.count,
            length=self.length,
            vocab_size=self.vocab_size,
            seed=self.seed,
        )

    @cached_property
    def facts(self) -> SampleFacts:
        """The facts that identify the samples, from the cache if nothing that determines them has changed."""
        key = self._key()
        known = read_cached("samples", key, SampleFacts) if key is not None else None
        if known is not None:
            return known
        found = self.windows
        facts = SampleFacts(
            digest=found.digest,
            windows=len(found.windows),
            longest=max(map(len, found.windows)),
            tokens=found.tokens,
            documents=len(found.document_lengths),
            document_lengths=found.length_histogram,
        )
        if key is not None and facts.tokens == self.count * self.length:  # too few tokens cause a warning each time
            with suppress(OSError):  # calibration reports why the cache cannot be used
                keep_cached("samples", key, facts)
        return facts

    def _key(self) -> str | None:
        """Digest of everything that determines the samples; None if the present content of the data is unknown."""
        content = content_of(self.data)
        if content is None:
            return None
        files = [path for path in (*tokenizer_files(self.model), self.model / CONFIG) if path.is_file()]
        decisive = {
            "content": content,
            "python": sys.version,  # whose text is the built-in data
            "sampling": [self.count, self.length, self.vocab_size, self.seed],
            "files": {path.name: file_digest(path) for path in files},
            "versions": [__version__, version("transformers"), version("tokenizers")],
        }
        return text_digest(repr(decisive))
