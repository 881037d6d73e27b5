"""Hints in the words of the command that was run.

Stages name the options of their own commands. `trtforge build` and others that run a recipe have few of those options:
there a hint names the recipe's key, as `--set` takes it.
"""

import re
from collections.abc import Collection, Sequence
from shlex import join
from typing import get_args

from trtforge.core.errors import Repair

_KEYS = {
    "--tp": "parallel.tp",
    "--pp": "parallel.pp",
    "--ep": "parallel.ep",
    "--quant": "quantization.format",
    "--kv-cache": "quantization.kv_cache",
    "--group-size": "quantization.group_size",
    "--awq-clip": "quantization.awq_clip",
    "--rounding": "quantization.rounding",
    "--kv-scales": "quantization.kv_scales",
    "--budget": "quantization.budget",
    "--exclude-module": "quantization.exclude_modules",
    "--memory": "quantization.memory",
    "--data": "quantization.calibration.data",
    "--samples": "quantization.calibration.samples",
    "--seq-len": "quantization.calibration.sequence_length",
    "--batch-size": "quantization.calibration.batch_size",
    "--seed": "quantization.calibration.seed",
    "--dtype": "model.dtype",
    "--allow-nonfinite": "model.allow_nonfinite",
    "--backend": "engine.backend",
    "--device": "engine.device",
    "--compute-dtype": "engine.compute_dtype",
    "--int8-activations": "engine.int8_activations",
    "--gpu": "engine.target.gpu",
    "--target-version": "engine.target.tensorrt_llm",
    "--max-batch-size": "engine.max_batch_size",
    "--max-input-len": "engine.max_input_len",
    "--max-seq-len": "engine.max_seq_len",
    "--max-num-tokens": "engine.max_num_tokens",
    "--max-beam-width": "engine.max_beam_width",
    "--feature": "engine.features",
}
"""The recipe's key for an option of a stage."""

_FLAGS = frozenset({"--awq-clip", "--allow-nonfinite"})
_COMMAND = re.compile(r"(`trtforge [^`]*`)")
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)(?: ([\w.:-]*\w))?")
_TOGETHER = re.compile(r"(?<![\w-])--[a-z][a-z-]* [\w.:]+(?: --[a-z][a-z-]* [\w.:]*\w)+")


def for_command(hint: str, options: Collection[str]) -> str:
    """`hint` for a command with these options: the others that it names become keys of `--set`.

    A whole command in backquotes stays as it is. For a command without --set, which decides the rest itself, options
    that it lacks are left out of those that are to be given together (`--quant fp8 --dtype float16`).
    """
    change = _translated if "--set" in options else _known
    parts = _COMMAND.split(hint)
    return "".join(part if number % 2 else change(part, options) for number, part in enumerate(parts))


def repaired(words: Sequence[str], repair: Repair, options: Collection[str]) -> str | None:
    """The command line with `repair` applied; None if it does not contain what is wrong.

    `options`: the options of its command.
    """
    found = list(words)
    if repair.wrong:
        places = [number for number, word in enumerate(found) if _has(word, repair.wrong)]
        if not places:
            return None
        last = places[-1]
        found[last] = found[last].replace(repair.wrong, repair.right)
    for option, value in repair.options:
        if option not in options and "--set" in options and option in _KEYS:
            option, value = "--set", f"{_KEYS[option]}={value}"
        if option not in options:
            return None
        _give(found, option, value)
    return join(["trtforge", *found])


def _has(word: str, wrong: str) -> bool:
    """Whether a word is the wrong one, or a setting or an option whose key or value is."""
    word = word.rstrip("/") or word  # as a path is named in messages
    return word == wrong or word.startswith(f"{wrong}=") or word.endswith(f"={wrong}")


def _give(words: list[str], option: str, value: str) -> None:
    """Give an option this value, in its place if it is there; of --set, the same key."""
    key = f"{value.partition('=')[0]}=" if option == "--set" else ""
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words) and words[number + 1].startswith(key):
            words[number + 1] = value
            return
        if word.startswith(f"{option}={key}"):
            words[number] = f"{option}={value}"
            return
    words += [option, value]


def _translated(text: str, options: Collection[str]) -> str:
    def setting(found: re.Match[str]) -> str:
        option, value = found[1], found[2]
        key = _KEYS.get(option)
        if key is None or option in options:
            return found[0]
        if option in _FLAGS:
            return f"--set {key}=true" + (f" {value}" if value else "")
        if value is not None and _is_value(value):
            return f"--set {key}={value}"
        return key + (f" {value}" if value else "")

    return _OPTION.sub(setting, text)


def _known(text: str, options: Collection[str]) -> str:
    def own(found: re.Match[str]) -> str:
        given = [option for option in _OPTION.finditer(found[0]) if option[1] in options]
        return " ".join(option[0] for option in given) if given else found[0]

    return _TOGETHER.sub(own, text)


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value, not the next word of the sentence."""
    from trtforge.core.recipe import Backend, Device, DtypeChoice, KvCacheFormat, QuantFormat
    from trtforge.plan.gpus import GPUS

    choices = {name for kind in (Backend, Device, DtypeChoice, KvCacheFormat, QuantFormat) for name in get_args(kind)}
    return word[0].isdigit() or word in choices or word in {gpu.name for gpu in GPUS}
