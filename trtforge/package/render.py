"""Renders templates to config.pbtxt, and checks that Triton can parse the result."""

import importlib.util
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trtforge.core.errors import ForgeError
from trtforge.formats.triton import CONFIG_FILE
from trtforge.package.triton_models import ModelSpec


def render_config(templates: Path, model: ModelSpec) -> str:
    """The text of a model's config.pbtxt, checked."""
    environment = Environment(
        loader=FileSystemLoader(templates), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quoted"] = _quoted
    environment.filters["boolean"] = lambda value: "true" if value else "false"
    text = environment.get_template(f"{model.role}/{CONFIG_FILE}.j2").render(model=model)
    check_config(text, model.name)
    return text


def check_config(text: str, name: str) -> None:
    """Raises ForgeError for an unfilled template placeholder, and for text that is not a model configuration."""
    for opening in ("${", "{{", "{%"):
        if opening in text:
            line = next(line for line in text.splitlines() if opening in line)
            raise ForgeError(
                f"{name}/{CONFIG_FILE}: unfilled template placeholder: {line.strip()}",
                hint="Fix the template or the setting.",
            )
    if importlib.util.find_spec("tritonclient") is None:
        return
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ForgeError(
            f"{name}/{CONFIG_FILE}: not a model configuration: {error}", hint="Fix the template or the setting."
        ) from None
    assert parsed.name == name


def _quoted(value: object) -> str:
    """A string in protobuf text format."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
