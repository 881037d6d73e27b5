"""One server's view of a repository: symbolic links in the server's runtime directory.

Python writes compiled modules beside the sources, which must not change the artifact. Also, a TensorRT-LLM config.pbtxt
contains the paths of its files inside the container, which differ here.
"""

from pathlib import Path

from trtforge.formats.triton import CONFIG_FILE, RepositoryFacts


def make_view(repository: Path, view: Path, facts: RepositoryFacts) -> None:
    """Create `view`, through which a server reads `repository`."""
    for model in sorted(path for path in repository.iterdir() if path.is_dir()):
        for version in sorted(path for path in model.iterdir() if path.is_dir()):
            target = view / model.name / version.name
            target.mkdir(parents=True)
            for entry in version.iterdir():
                (target / entry.name).symlink_to(entry.resolve())
        _write_config(model, view / model.name / CONFIG_FILE, facts)


def _write_config(model: Path, target: Path, facts: RepositoryFacts) -> None:
    if facts.backend != "tensorrt_llm" or model.name not in facts.engine_models:
        target.symlink_to((model / CONFIG_FILE).resolve())
        return
    text = (model / CONFIG_FILE).read_text(encoding="utf-8")
    packaged, here = Path(facts.engine_path).parents[2] / model.name / "1", (model / "1").resolve()
    target.write_text(text.replace(f'"{packaged}/', f'"{here}/'), encoding="utf-8")
