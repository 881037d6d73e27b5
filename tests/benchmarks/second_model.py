"""`python -m tests.benchmarks.second_model OUT`: a small Llama of C++ headers, and texts to calibrate and judge.

The text is torch's own headers, which every installation has. Training goes on from the demo model's weights, for which
a few minutes suffice. Steps are counted, not minutes, so that a machine repeats its result.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from trtforge.core.assets import asset_directory

TRAINING, HELD_OUT = "training.txt", "heldout.txt"
STEPS, WARM_UP, BATCH, LENGTH = 160, 10, 4, 512
_RATE = 1.5e-3
_SEPARATOR = "\n\f\n"
_HELD_OUT_EVERY = 20  # of the documents
_MOST_CHARACTERS = 4_000_000


def main() -> None:
    """Train into the directory named on the command line."""
    train(Path(sys.argv[1]))


def train(out: Path) -> Path:
    """Train and save the model, its tokenizer and both texts below `out`; the model's directory."""
    torch.manual_seed(0)
    demo = asset_directory("recipes") / "demo-model"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    training = write_texts(out)
    ids = torch.tensor([token for text in training for token in tokenizer(text)["input_ids"]])
    model = LlamaForCausalLM.from_pretrained(demo, dtype=torch.float32)
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
    documents = _documents()
    training = [text for index, text in enumerate(documents) if index % _HELD_OUT_EVERY]
    out.mkdir(parents=True, exist_ok=True)
    (out / TRAINING).write_text(_SEPARATOR.join(training))
    (out / HELD_OUT).write_text(_SEPARATOR.join(documents[::_HELD_OUT_EVERY]))
    return training


def _share_of_rate(step: int) -> float:
    """Of the highest learning rate: rising, then falling to a fiftieth."""
    return (step + 1) / WARM_UP if step < WARM_UP else max(0.02, 1 - (step - WARM_UP) / (STEPS - WARM_UP))


def _documents() -> list[str]:
    """The headers in the order of their names, from every part of torch."""
    root = Path(torch.__file__).parent / "include"
    found, total = [], 0
    for path in sorted(root.rglob("*.h"), key=lambda path: (hash_of(path.name), path.name)):
        text = path.read_text(errors="ignore")
        if len(text) > 2000 and total + len(text) <= _MOST_CHARACTERS:
            found.append(text.replace("\f", "\n"))
            total += len(text)
    return found


def hash_of(name: str) -> int:
    """A number that mixes directories and alphabets, the same in every process."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(name)) * 2654435761 % 2**32


if __name__ == "__main__":
    main()
