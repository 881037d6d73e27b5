"""Serves a packaged repository with other settings; each variant is packaged again into its own directory."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.defaults import READY_TIMEOUT
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, read_manifest, require_manifest
from trtforge.core.serving import ServingConfig
from trtforge.core.verified import open_to_run, remember_links
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.prometheus import KV_BLOCKS
from trtforge.formats.tokenizer import TOKENIZER_FILE
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.formats.trtllm import read_engine_config
from trtforge.machine.nvml import VISIBLE_DEVICES, load_nvml
from trtforge.machine.owned_files import owned, remove_owned, remove_ownerless
from trtforge.package.config import PackageConfig
from trtforge.package.engine_facts import read_engine
from trtforge.package.parameters import ENGINE_DIRECTORY, queue_size
from trtforge.package.stage import package
from trtforge.serve.embedded import check_embedded
from trtforge.serve.host_checks import visible_gpus
from trtforge.serve.local_server import LocalServer, local_server
from trtforge.serve.metrics import read_metrics
from trtforge.serve.speed import Load
from trtforge.tune.variants import Limits, Variant

_PREFIX = ".trtforge-tune-"
_NAMES = re.compile(r"\.trtforge-tune-[a-z0-9_]+")


@dataclass(frozen=True)
class Packaged:
    """A repository and the inputs for packaging it again."""

    repository: Path
    manifest: Manifest
    facts: RepositoryFacts
    config: PackageConfig

    @classmethod
    def open(cls, repository: Path) -> "Packaged":
        """Check the repository's files and read it. Raises ForgeError, also if it cannot be packaged again."""
        manifest = open_to_run(repository, "repository")
        recorded = manifest.identity.config.get("package")
        facts = read_facts(manifest)
        if not isinstance(recorded, dict):
            raise ForgeError(
                f"{repository}: its settings are not recorded, so it cannot be packaged with others",
                hint="Tune a repository that `trtforge package` or `trtforge build` wrote.",
            )
        if facts.draft_ranks:
            raise ForgeError(
                f"{repository}: repositories with a draft engine are not tuned",
                hint="Package the engine without serving.draft_engine, or measure it with `trtforge bench`.",
            )
        config = PackageConfig.parse(recorded, str(repository))
        # All settings are recorded. `given` names the set ones, as an LLM API engine keeps its own values of others.
        names = manifest.identity.config.get("given")
        given = config.serving.model_dump(exclude_defaults=True)
        if isinstance(names, list):
            given = config.serving.model_dump(include={name for name in names if isinstance(name, str)})
        return cls(repository, manifest, facts, config.model_copy(update={"serving": ServingConfig(**given)}))

    @property
    def engine(self) -> Path:
        """The engine in the repository."""
        return self.repository / self.facts.model("tensorrt_llm") / "1" / ENGINE_DIRECTORY

    @property
    def tokenizer(self) -> Path:
        """The directory of the packaged tokenizer."""
        return self.repository / self.facts.model("preprocessing") / "1" / TOKENIZER_DIRECTORY

    def is_of(self, engine: Path) -> bool:
        """Whether it was packaged from the artifact in that directory."""
        found = read_manifest(engine) if engine.is_dir() else None
        return found is not None and found.digest == self.manifest.identity.inputs.get("engine")

    def limits(self, load: Load) -> Limits:
        """The limits of its engine. Raises ForgeError, also if the engine does not accept prompts of this length or
        this concurrency."""
        manifest = require_manifest(self.engine, "engine")
        facts = read_engine(self.engine, manifest, self.config.features)
        tokens: object = facts.llm_args.max_num_tokens if facts.llm_args is not None else None
        if facts.llm_args is None:
            build = read_engine_config(self.engine)[1].get("build_config")
            tokens = build.get("max_num_tokens") if isinstance(build, dict) else None
        if load.prompt_tokens > facts.max_input_len:
            raise ForgeError(
                f"--prompt-tokens {load.prompt_tokens}: the engine takes prompts of up to {facts.max_input_len} tokens",
                hint="Give a shorter length.",
            )
        serving, most = self.config.serving, max(load.concurrency)
        batch, queue = min(facts.max_batch_size, serving.max_batch_size or facts.max_batch_size), queue_size(serving)
        if facts.backend != "tensorrt_llm" and most > batch + queue:
            raise ForgeError(
                f"--concurrency {most}: the repository refuses more than {batch + queue} requests at once "
                f"(max_batch_size {batch} + max_queue_size {queue})",
                hint="Give lower loads, or package it with a larger serving.max_queue_size.",
            )
        chunked = self.config.chunked_context
        return Limits(
            backend=facts.backend,
            max_batch_size=facts.max_batch_size,
            max_num_tokens=tokens if isinstance(tokens, int) else None,
            chunked_context=facts.features.chunked_context if chunked is None else chunked,
        )

    def require_runnable(self) -> None:
        """Raises ForgeError if the engine cannot run on this machine."""
        check_embedded(self.facts, self.repository)
        if self.facts.backend != "torch" and visible_gpus(load_nvml, os.environ.get(VISIBLE_DEVICES)) == ():
            raise ForgeError(
                f"{self.repository}: its engine of backend {self.facts.backend} needs an NVIDIA GPU, and this machine "
                "has none",
                hint="Run the same command on the machine that serves it; --dry-run shows here what it would measure.",
            )


@dataclass(frozen=True)
class Workplace:
    """A directory for the variants of a repository, which `workplace` removes at the end."""

    packaged: Packaged
    directory: Path

    @contextmanager
    def served(self, variant: Variant) -> Iterator[LocalServer]:
        """Serve a variant on free loopback ports. Raises ForgeError if it cannot be packaged or started."""
        out = self.directory / "repository"
        config = self.packaged.config
        changed = config.model_copy(update={"serving": variant.applied(config.serving)})
        package(changed, self.packaged.engine, self.packaged.tokenizer, out)
        remember_links(out, "repository", self.packaged.repository)  # so that it starts without reading large engines
        with local_server(out, ready_timeout=READY_TIMEOUT) as server:
            yield server

    @property
    def tokenizer(self) -> Path:
        """The served tokenizer.json."""
        return self.packaged.tokenizer / TOKENIZER_FILE

    @property
    def model(self) -> str:
        """The text model."""
        return self.packaged.facts.model("ensemble")


@contextmanager
def workplace(packaged: Packaged) -> Iterator[Workplace]:
    """A directory beside the repository, so that engines are hard-linked, or a temporary one if that place is
    read-only.

    Remains of killed runs beside it are removed.
    """
    with ExitStack() as stack:
        parent = packaged.repository.resolve().parent
        try:
            remove_ownerless(parent, _PREFIX, _NAMES)
            directory = _directory_in(parent, stack)
        except OSError:
            directory = _directory_in(Path(tempfile.gettempdir()), stack)
        yield Workplace(packaged, directory)
    # Creating and removing links changed the inode times by which verified files are recognised.
    remember_links(packaged.repository, "repository", packaged.repository)


def _directory_in(parent: Path, stack: ExitStack) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    stack.enter_context(owned(directory))
    stack.callback(remove_owned, directory)
    return directory


def kv_tokens(server: LocalServer) -> int | None:
    """The capacity of a server's KV cache in tokens; None if its metrics lack it."""
    try:
        samples = read_metrics(server.metrics)
    except ForgeError:
        return None
    blocks = {sample.labels.get("kv_cache_block_type"): sample.value for sample in samples if sample.name == KV_BLOCKS}
    return round(blocks.get("max", 0) * blocks.get("tokens_per", 0)) or None
