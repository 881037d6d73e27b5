"""Parse `--gate`, and print a verification."""

import re
from pathlib import Path
from typing import Any

from trtforge.cli import show
from trtforge.cli.options import from_options
from trtforge.core.config_model import parse_value
from trtforge.core.errors import AbsentFile, ForgeError, UsageError
from trtforge.core.recipe import GateConfig, gate_from
from trtforge.core.yaml_text import read_yaml
from trtforge.verify.result import Interval, Verification

_NEXT_KEY, _DATA = re.compile(r",(?=\w+=)"), "data"
"""Commas between keys: paths may have others."""
_INLINE = "perplexity_increase=0.02,top1_agreement=0.95"


def parse_gate(text: str | None, data: dict[str, Any]) -> GateConfig:
    """Parse a YAML file with the gate's keys, or KEY=VALUE,...; `data` supplies keys that are not given.

    Raises UsageError for a value that is not a gate or has no limit, ForgeError for an unreadable or invalid file.
    """
    if text is None:
        return GateConfig.parse(data, "--gate")
    if "=" in text:
        pairs = [item.partition("=") for item in _NEXT_KEY.split(text)]
        keys = {key: value if key == _DATA else parse_value(value, f"--gate {key}") for key, _, value in pairs}
        return _with_limit(from_options(GateConfig, data | keys, "--gate", str), text)
    path = Path(text)
    hint = f"Give a YAML file, or {_INLINE}."
    try:
        values = read_yaml(path, hint=hint)
    except AbsentFile:
        raise ForgeError(f"--gate {text!r}: No such file or directory", hint=hint) from None
    except ForgeError as error:
        raise ForgeError(f"--gate {error.message}", hint=hint) from None
    stated = values.get("gate", values) if isinstance(values, dict) else None
    if not isinstance(stated, dict):
        raise ForgeError(f"--gate {text}: not a mapping", hint="Give the keys of a recipe's gate.")
    gate = GateConfig.parse(data | stated, text)
    return _with_limit(gate_from(gate, path.parent) if _DATA in stated else gate, text)


def _with_limit(gate: GateConfig, text: str) -> GateConfig:
    if not gate.limits:
        raise UsageError(f"--gate {text}: sets no limit", hint=f"Set at least one limit, such as {_INLINE}.")
    return gate


def show_verification(result: Verification, *, json_output: bool) -> None:
    """Print the metrics as JSON or as a table, and the limits of the gate that do not hold."""
    if json_output:
        show.as_json(result.as_json())
        return
    perplexity = result.perplexity
    rows = [
        ["perplexity, reference", f"{perplexity.reference:.4f}"],
        ["perplexity, converted", f"{perplexity.candidate:.4f}"],
        ["increase of perplexity", f"{perplexity.increase:+.3%}{_between(perplexity.interval, '+.3%')}"],
        ["top-1 agreement", f"{result.top1_agreement:.2%}"],
        ["mean KL divergence (nats)", f"{result.kl.mean:.3e}{_between(result.kl.mean_interval, '.3e')}"],
        ["99th percentile of KL", f"{result.kl.p99:.3e}{_between(result.kl.p99_interval, '.3e')}"],
        ["largest logit error", f"{result.max_abs_logit_error:.3e}"],
        ["tokens", str(result.tokens)],
        ["tensors checked", str(result.tensors_checked)],
    ]
    show.table("Verification", ["figure", "value"], rows)
    if result.layers:
        found = [[str(layer.layer), f"{layer.error:.3e}", f"{layer.added:+.3e}"] for layer in result.layers]
        show.table("Error after each layer", ["layer", "relative error", "added"], found)
        print(f"layer {result.worst_layer} adds the largest error")
    for text in result.notes:
        show.note(text)
    for failure in result.failures:
        print(f"gate: {failure}")
    print("passed" if result.passed else "failed")


def _between(interval: Interval | None, form: str) -> str:
    """The 95 % interval in brackets; nothing with too few tokens for one."""
    return "" if interval is None else f" (95 %: {interval.low:{form}} to {interval.high:{form}})"
