"""Files that are installed with the program: recipes and model repository templates."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def asset_directory(name: str) -> Path:
    """`recipes` or `model_repo_templates`: inside the installed wheel, or beside the package in a source checkout."""
    installed = _PACKAGE / "_share" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
