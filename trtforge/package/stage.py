"""The package stage: checks engine and tokenizer, then writes the repository."""

import logging
from pathlib import Path

from trtforge import __version__
from trtforge.core.artifact import Produced, produce
from trtforge.core.assets import asset_directory
from trtforge.core.digest import file_digest
from trtforge.core.manifest import Identity
from trtforge.formats.adapter import resolved_features
from trtforge.formats.foreign import engine_manifest
from trtforge.package.config import PackageConfig
from trtforge.package.draft import draft_warnings, read_draft
from trtforge.package.engine_facts import read_engine
from trtforge.package.parameters import require_servable, serving_args
from trtforge.package.repository import EngineFiles, RepositoryWriter, own_modules, template_files
from trtforge.package.target import check_target
from trtforge.package.tokenizer import find_tokenizer, other_tokenizer, read_tokenizer
from trtforge.package.triton_models import model_specs, repository_facts

_LOG = logging.getLogger(__name__)


def package(config: PackageConfig, engine: Path, tokenizer: Path | None, out: Path, *, force: bool = False) -> Produced:
    """Write the Triton model repository of an engine to `out`, or reuse a matching one there.

    `tokenizer`: a Hugging Face directory; None: the files that compile put into the engine. The repository contains the
    engine (hard-linked if possible) and the tokenizer, so it can be moved. Raises ForgeError, before anything is
    written, for an incomplete engine, a missing or damaged tokenizer, ids beyond the vocabulary, a setting that the
    engine cannot serve, and an engine that cannot run on `config.target`; logs warnings if it may not run there, and
    for a tokenizer other than the engine's own.
    """
    manifest = engine_manifest(engine)
    if config.features is not None:
        config = config.model_copy(update={"features": resolved_features(config.features)})
    facts = read_engine(engine, manifest, config.features)
    warnings = [*check_target(facts, config.target), *require_servable(config, facts)]
    draft = read_draft(config, facts)
    warnings += draft_warnings(draft, config) if draft is not None else ()
    if tokenizer is not None:
        warnings += other_tokenizer(tokenizer, engine, facts.vocab_size, guides=facts.backend == "torch")
    for warning in dict.fromkeys(warnings):
        _LOG.warning(warning)
    assets = read_tokenizer(find_tokenizer(tokenizer, engine), facts.vocab_size)
    models = model_specs(config, facts, assets, draft)
    llm_args = serving_args(config, facts)
    templates, included = asset_directory("model_repo_templates"), own_modules(facts.backend)
    identity = Identity(
        stage="repository",
        config={
            "package": config.model_dump(mode="json", exclude={"target": True, "serving": {"draft_engine"}}),
            "repository": repository_facts(config, facts, draft.facts if draft else None).recorded(),
            "end_ids": list(assets.end_ids),
            "pad_id": assets.pad_id,
        }
        | ({"model_yaml": llm_args.to_json(), "given": sorted(config.serving.model_fields_set)} if llm_args else {}),
        inputs={
            "engine": manifest.digest,
            **({"draft_engine": draft.manifest.digest} if draft else {}),
            **{f"tokenizer/{file.name}": file_digest(file) for file in assets.files if file.is_file()},
            **{
                f"templates/{path.relative_to(templates).as_posix()}": file_digest(path)
                for path in template_files(templates)
            },
            **{name: file_digest(path) for name, path in included.items()},
        },
        versions={"trtforge": __version__},
    )
    guided = config.serving.guided_decoding_backend is not None and facts.backend == "tensorrt_llm"
    root = config.serving_root.rstrip("/")
    engines = EngineFiles(engine, manifest), EngineFiles(draft.directory, draft.manifest) if draft else None
    writer = RepositoryWriter(templates, models, *engines, assets, included, llm_args, guided=guided, root=root)
    return produce(out, identity, writer.write, force=force)
