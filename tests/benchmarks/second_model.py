"""`python -m tests.benchmarks.second_model OUT`: a small GPT-NeoX of Python code, and texts to calibrate and judge.

Nothing in it comes from the demo model: another architecture (LayerNorm, biases, no gate, parallel residuals), another
tokenizer, trained from random weights on code without comments and docstrings, which are the demo model's text. Steps
are counted, not minutes, so that a machine repeats its result.
"""

import argparse
import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

NAME = "a GPT-NeoX of Python code"
TRAINING, HELD_OUT = "training.txt", "heldout.txt"
STEPS, WARM_UP, BATCH, LENGTH = 400, 30, 8, 256
VOCABULARY, HIDDEN, LAYERS, HEADS = 3072, 256, 5, 8
END = "<|endoftext|>"
_RATE = 3e-3
_SEPARATOR = "\n\f\n"
_HELD_OUT_OF = 20  # one of so many files
_CHARACTERS = range(2_000, 60_000)  # of a file
_MOST_CHARACTERS = 6_000_000
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings"})


def main() -> None:
    """Train into the directory named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.second_model", description="Train the model.")
    parser.add_argument("out", type=Path, help="directory of the model, its tokenizer and both texts")
    train(parser.parse_args().out)


def train(out: Path) -> Path:
    """Train and save the model, its tokenizer and both texts below `out`; the model's directory."""
    torch.manual_seed(0)
    texts = write_texts(out)
    tokenizer = _tokenizer(texts)
    end = tokenizer.convert_tokens_to_ids(END)
    ids = torch.tensor([token for text in texts for token in (*tokenizer(text)["input_ids"], end)])
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _share_of_rate)
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        batch = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def write_texts(out: Path) -> list[str]:
    """Write the text to calibrate on, and the held-out text; the documents of the former."""
    training, held_out, size = list[str](), list[str](), 0
    for text, held in _documents():
        if size < _MOST_CHARACTERS:
            (held_out if held else training).append(text)
            size += len(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / TRAINING).write_text(_SEPARATOR.join(training))
    (out / HELD_OUT).write_text(_SEPARATOR.join(held_out))
    return training


def _model() -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPTNeoXForCausalLM(config)


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-NeoX's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def _share_of_rate(step: int) -> float:
    """Of the highest learning rate: rising, then falling to a fiftieth."""
    return (step + 1) / WARM_UP if step < WARM_UP else max(0.02, 1 - (step - WARM_UP) / (STEPS - WARM_UP))


def _documents() -> Iterator[tuple[str, bool]]:
    """The code of modules of the standard library and whether it is held out, mixed by digests of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    mixed = {path: hashlib.sha256(path.as_posix().encode()).digest() for path in paths}
    for path in sorted(paths, key=lambda path: mixed[path]):
        if _SKIPPED.isdisjoint(path.parts) and (root / path).stat().st_size in _CHARACTERS:
            text = _code(root / path)
            if text:
                yield text.replace("\f", "\n"), mixed[path][-1] % _HELD_OUT_OF == 0


def _code(path: Path) -> str:
    """A module without comments and docstrings; nothing if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_string(each)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    main()
