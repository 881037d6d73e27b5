"""Writes the files of a repository: the code of each model, the engine and the tokenizer."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import trtforge
from trtforge.core.clone import link_or_copy
from trtforge.core.manifest import FILE_NAME, Manifest, record_of
from trtforge.core.manifest import FileRecord as Record
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.llmapi import MODEL_FILE, SERVE_FILE, LlmArgs
from trtforge.formats.tokenizer import TOKENIZER_FILE, load_tokenizer
from trtforge.formats.triton import CONFIG_FILE, ModelRole
from trtforge.package.parameters import ENGINE_DIRECTORY, TOKENIZER_INFO_FILE
from trtforge.package.render import render_config
from trtforge.package.tokenizer import CHAT_FILE, TokenizerAssets
from trtforge.package.triton_models import TEXT_ROLES, ModelCode, ModelSpec

VERSION = "1"
_PACKAGE = Path(trtforge.__file__).parent
_PROCESS = ("model_config", "model_process", "responder")
_TEXT = (
    *_PROCESS,
    "answer_report",
    "background",
    "chat_template",
    "input_names",
    "input_values",
    "preprocessor",
    "text_answer",
    "text_engine",
    "text_model",
    "text_options",
    "token_texts",
    "tokenizer_file",
    "sequence_texts",
    "watch",
    "word_lists",
)
_ENGINE = (
    "engine_outputs",
    "engine_requests",
    "input_values",
    "request_tensors",
    "request_types",
    "retention_inputs",
    "served_engine",
    "text_engine",
    "token_texts",
    "word_lists",
)
_ENGINE_TEXT = tuple(dict.fromkeys((*_TEXT, *_ENGINE, "drafted_served", "strict_guides")))
_ENGINE_MODEL = (*_PROCESS, *_ENGINE, "engine_metrics", "engine_process_model", "input_names", "watch")
LIBRARIES: dict[ModelRole, Mapping[ModelCode, tuple[str, ...]]] = {
    "ensemble": {"1": _ENGINE_TEXT, "triton": (*_TEXT, "drafted_engine", "kserve_messages", "triton_engine")},
    "preprocessing": {
        "1": (*_PROCESS, "chat_template", "input_values", "preprocessor", "tokenizer_file", "word_lists"),
    },
    "tensorrt_llm": {
        "1": _ENGINE_MODEL,
        "llmapi": (*_ENGINE_MODEL, "llmapi_arguments", "llmapi_engine", "llmapi_sampling", "llmapi_scores"),
    },
    "postprocessing": {"1": (*_PROCESS, "tokenizer_file")},
    "tensorrt_llm_bls": {"1": _ENGINE_TEXT, "triton": (*_TEXT, "drafted_engine", "kserve_messages", "triton_engine")},
}
"""The modules of lib/ that a model's code imports, copied into each model's directory."""
_TEXT_MODULES = (
    "__init__",
    "core/__init__",
    "core/call_tags",
    "core/detokenizer",
    "core/harmony",
    "core/mistral_tokens",
    "core/prompt_template",
    "core/reasoning",
    "core/stop_text",
    "core/template_messages",
    "core/template_tools",
    "core/token_texts",
)
_OWN_MODULES: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "tensorrt_llm": _TEXT_MODULES,
    "llmapi": (
        *_TEXT_MODULES,
        "core/errors",
        "core/interpreter",
        "core/json_schema",
        "core/json_text",
        "core/memory_errors",
        "core/reading",
        "core/server_errors",
        "core/strict_calls",
        "machine/__init__",
        "machine/processes",
        *(
            f"engine_process/{name}"
            for name in (
                "__init__",
                "admission",
                "client",
                "connection",
                "context_phase",
                "control",
                "ended_requests",
                "frames",
                "host",
                "messages",
                "progress",
                "rendezvous",
                "requests",
                "retention",
                "server",
                "start",
            )
        ),
    ),
}
"""The trtforge modules that these import, by backend: NVIDIA's images lack them. None needs another package."""
USING_TRTFORGE = frozenset({"chat_template", "token_texts"})
"""The modules of lib/ by which a model is known to import them."""


@dataclass(frozen=True)
class EngineFiles:
    """An engine directory and its manifest."""

    directory: Path
    manifest: Manifest


@dataclass(frozen=True)
class RepositoryWriter:
    """Writes one repository from the templates in `templates`. `guided`: with what guided decoding needs.

    `own_modules`: what the function of this name returns. `draft`: the engine of the model that drafts. `root`: path of
    the repository where it is served.
    """

    templates: Path
    models: tuple[ModelSpec, ...]
    engine: EngineFiles
    draft: EngineFiles | None
    tokenizer: TokenizerAssets
    own_modules: Mapping[str, Path]
    llm_args: LlmArgs | None = None
    guided: bool = False
    root: str = ""

    def write(self, out: Path) -> dict[str, Record]:
        """Write everything below `out`; returns the records of the files whose digests are already known."""
        records: dict[str, Record] = {}
        for model in self.models:
            version = out / model.name / VERSION
            version.mkdir(parents=True)
            (out / model.name / CONFIG_FILE).write_text(render_config(self.templates, model), encoding="utf-8")
            if model.backend == "python":
                self._write_code(model, version)
            if model.role == "tensorrt_llm":
                engine = self.draft if model.draft else self.engine
                assert engine is not None, "a draft model has an engine"
                records |= _link_engine(engine, version / ENGINE_DIRECTORY, out)
                if self.guided and not model.draft:
                    self.tokenizer.write_guidance(version / TOKENIZER_INFO_FILE)
        self._write_tokenizers(out)
        return records

    def _write_code(self, model: ModelSpec, version: Path) -> None:
        shutil.copyfile(self.templates / model.role / model.code / "model.py", version / "model.py")
        for name in LIBRARIES[model.role][model.code]:
            shutil.copyfile(self.templates / "lib" / f"{name}.py", version / f"{name}.py")
        if not USING_TRTFORGE.isdisjoint(LIBRARIES[model.role][model.code]):
            for module, path in self.own_modules.items():
                target = version / module
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        if self.llm_args is not None and model.role == "tensorrt_llm":
            (version / MODEL_FILE).write_text(self.llm_args.to_yaml(), encoding="utf-8")
            served = self.llm_args.to_serve_yaml(f"{self.root}/{model.name}/{VERSION}")
            (version / SERVE_FILE).write_text(served, encoding="utf-8")

    def _write_tokenizers(self, out: Path) -> None:
        """Write tokenizer.json for each model that needs it, and all tokenizer files, for clients, to preprocessing."""
        users = [model for model in self.models if model.role != "tensorrt_llm"]
        whole = next(model for model in users if model.role == "preprocessing")
        source = out / whole.name / VERSION / TOKENIZER_DIRECTORY
        source.mkdir()
        for file in self.tokenizer.files:
            self.tokenizer.write(file.name, source / file.name)
        if not self.tokenizer.is_fast:  # a fast tokenizer was already checked, before anything was written
            load_tokenizer(source / TOKENIZER_FILE)
        for model in users:
            if model is not whole:
                target = out / model.name / VERSION / TOKENIZER_DIRECTORY
                target.mkdir()
                link_or_copy(source / TOKENIZER_FILE, target / TOKENIZER_FILE)
            if model.role in TEXT_ROLES:
                self.tokenizer.write_chat(out / model.name / VERSION / TOKENIZER_DIRECTORY / CHAT_FILE)


def _link_engine(engine: EngineFiles, target: Path, out: Path) -> dict[str, Record]:
    """Add an engine's files, as hard links if possible, because engines are large; returns their records."""
    below = target.relative_to(out).as_posix()
    for name in engine.manifest.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(engine.directory / name, target / name)
    engine.manifest.write(target)
    records = {f"{below}/{name}": record for name, record in engine.manifest.files.items()}
    return records | {f"{below}/{FILE_NAME}": record_of(target / FILE_NAME)}


def own_modules(backend: str) -> dict[str, Path]:
    """The trtforge modules that models of a backend include, by their path in the model."""
    return {f"{_PACKAGE.name}/{name}.py": _PACKAGE / f"{name}.py" for name in _OWN_MODULES[backend]}


def template_files(templates: Path) -> Iterator[Path]:
    """Every template and module that a repository is made from, sorted."""
    return (path for path in sorted(templates.rglob("*")) if path.suffix in (".py", ".j2"))
