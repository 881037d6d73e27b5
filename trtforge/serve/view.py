"""A repository as one server sees it: symbolic links in the server's runtime directory.

Python writes its compiled modules beside the sources, which must not get into the artifact; and the engine's path in a
TensorRT-LLM config.pbtxt is that of the container, which is another one here.
"""

from pathlib import Path

from trtforge.formats.triton import RepositoryFacts

CONFIG = "config.pbtxt"


def make_view(repository: Path, view: Path, facts: RepositoryFacts) -> None:
    """Create `view`, through which a server reads `repository`."""
    for model in sorted(path for path in repository.iterdir() if path.is_dir()):
        for version in sorted(path for path in model.iterdir() if path.is_dir()):
            target = view / model.name / version.name
            target.mkdir(parents=True)
            for entry in version.iterdir():
                (target / entry.name).symlink_to(entry.resolve())
        _write_config(model, view / model.name / CONFIG, facts)


def _write_config(model: Path, target: Path, facts: RepositoryFacts) -> None:
    if facts.backend != "tensorrt_llm" or model.name != facts.model("tensorrt_llm"):
        target.symlink_to((model / CONFIG).resolve())
        return
    text = (model / CONFIG).read_text(encoding="utf-8")
    engine = (model / "1" / Path(facts.engine_path).name).resolve()
    target.write_text(text.replace(f'"{facts.engine_path}"', f'"{engine}"'), encoding="utf-8")
