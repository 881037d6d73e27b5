"""Train the demo model: a four-million-parameter Llama on the prose of Python's standard library.

Usage: python recipes/train_demo_model.py [--out recipes/demo-model] [--minutes 25] [--seed 0]
The result is an ordinary Hugging Face directory, small enough to live in the repository.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from trtforge.formats.stdlib_text import stdlib_documents

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
START = "<|start|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (BEGIN_OF_TEXT, END_OF_TEXT, START, END, PAD)
DOCUMENT_SEPARATOR = "\n\f\n"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """A Llama with every dimension a multiple of what GEMM kernels and tensor parallelism by two like."""

    vocabulary: int = 2048
    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 8
    key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class TrainingPlan:
    """How to train; the learning rate follows the share of `minutes` that has passed."""

    minutes: float
    seed: int
    sequence_length: int = 512
    long_sequence_length: int = 2048
    # Without some long sequences the model would be lost beyond position 512 of the 2048 it declares.
    long_every: int = 8
    tokens_per_step: int = 4096
    learning_rate: float = 3e-3
    final_share: float = 0.02
    warmup_share: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    report_every: int = 50
    # About one token in twenty then belongs to a conversation, which is what teaches the chat template.
    conversation_share: float = 0.5
    compiled: bool = False


@dataclass(frozen=True)
class Perplexities:
    """Held-out perplexity of the model and of token frequencies alone."""

    model: float
    unigram: float


def main() -> int:
    """Train, save and measure; return 1 if the model is not clearly better than token frequencies."""
    arguments = _arguments()
    started = time.monotonic()
    shape = ModelShape()
    plan = TrainingPlan(minutes=arguments.minutes, seed=arguments.seed, compiled=arguments.compile)
    torch.manual_seed(plan.seed)
    training = list(stdlib_documents("train"))
    held_out = _capped(stdlib_documents("held_out"), arguments.held_out_bytes)
    tokenizer = train_tokenizer(training, shape.vocabulary)
    held_out_tokens = _joined(tokenizer, held_out)
    print(f"{len(training)} training documents, {sum(map(len, training)):,} characters; "
          f"{len(held_out)} held-out documents, {len(held_out_tokens):,} tokens", flush=True)  # fmt: skip
    model = LlamaForCausalLM(_model_config(shape, tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, training, held_out_tokens, plan)
    save(model, tokenizer, held_out, arguments.out)

    saved = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    perplexities = Perplexities(
        model=math.exp(held_out_loss(saved, held_out_tokens, plan.sequence_length)),
        unigram=unigram_perplexity(_joined(tokenizer, training), held_out_tokens, shape.vocabulary, plan),
    )
    (arguments.out / "README.md").write_text(_readme(shape, plan, perplexities), encoding="utf-8")
    ratio = perplexities.model / perplexities.unigram
    print(f"held-out perplexity: model {perplexities.model:.2f}, unigram {perplexities.unigram:.2f}, "
          f"ratio {ratio:.4f}; {(time.monotonic() - started) / 60:.1f} minutes in all")  # fmt: skip
    return 0 if ratio <= 0.25 else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo-model")
    parser.add_argument("--minutes", type=float, default=25.0, help="wall time of the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-bytes", type=int, default=200_000, help="cap on the size of heldout.txt")
    parser.add_argument("--compile", action="store_true", help="about a third faster; needs a C++ compiler")
    return parser.parse_args()


def _capped(documents: Iterator[str], limit: int) -> list[str]:
    """Return the documents in order, without those that would take the total past the limit."""
    kept, size = [], 0
    for document in documents:
        length = len((document + DOCUMENT_SEPARATOR).encode())
        if size + length <= limit:
            kept.append(document)
            size += length
    return kept


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer: any UTF-8 text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        # Bytes that the corpus lacks must have tokens too.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    begin = tokenizer.token_to_id(BEGIN_OF_TEXT)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN_OF_TEXT} $A",
                pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT} $B:1",
                special_tokens=[(BEGIN_OF_TEXT, begin)],
            ),
        ]
    )
    return tokenizer


def _model_config(shape: ModelShape, tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id(BEGIN_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    held_out_tokens: np.ndarray,
    plan: TrainingPlan,
) -> None:
    """Train in place until the plan's minutes have passed."""
    optimizer = _optimizer(model, plan)
    batches = _batches(tokenizer, documents, plan)
    fast_loss = torch.compile(_loss, dynamic=False) if plan.compiled else _loss
    # The first call compiles, which must not count as warm-up time; its gradients are dropped.
    fast_loss(model, next(batches)).backward()
    optimizer.zero_grad(set_to_none=True)
    started = time.monotonic()
    seen = 0
    average = float("nan")
    for step in itertools.count(1):
        elapsed = time.monotonic() - started
        passed = elapsed / (plan.minutes * 60)
        if passed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _learning_rate_share(passed, plan)
        batch = next(batches)
        # Compiled attention is slower than PyTorch's own for the few long sequences.
        loss = (fast_loss if batch.shape[1] <= plan.sequence_length + 1 else _loss)(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += batch.numel()
        average = loss.item() if math.isnan(average) else 0.95 * average + 0.05 * loss.item()
        if step % plan.report_every == 0:
            checked = step % (plan.report_every * 5) == 0
            held_out = held_out_loss(model, held_out_tokens, plan.sequence_length) if checked else None
            extra = "" if held_out is None else f", held-out {held_out:.3f}"
            print(f"step {step}: loss {average:.3f}{extra}, {seen:,} tokens, {seen / elapsed:,.0f} tokens/s, "
                  f"{plan.minutes - elapsed / 60:.1f} minutes left", flush=True)  # fmt: skip


def _loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    # No rounding of the weights themselves: bfloat16 only in the matrix products, where it is faster.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _optimizer(model: LlamaForCausalLM, plan: TrainingPlan) -> torch.optim.AdamW:
    # Decay pulls norm scales towards zero for no benefit, so they are left out of it.
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))


def _learning_rate_share(passed: float, plan: TrainingPlan) -> float:
    if passed < plan.warmup_share:
        return max(passed / plan.warmup_share, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * (passed - plan.warmup_share) / (1 - plan.warmup_share)))
    return plan.final_share + (1 - plan.final_share) * cosine


def _batches(tokenizer: Tokenizer, documents: Sequence[str], plan: TrainingPlan) -> Iterator[torch.Tensor]:
    """Yield batches of packed documents for ever; each has one token per row more than it predicts."""
    shuffle = random.Random(plan.seed)
    stream = _token_stream(tokenizer, documents, plan, shuffle)
    for step in itertools.count(1):
        length = plan.sequence_length if step % plan.long_every else plan.long_sequence_length
        rows = plan.tokens_per_step // length
        tokens = np.fromiter(itertools.islice(stream, rows * (length + 1)), np.int64, rows * (length + 1))
        yield torch.from_numpy(tokens.reshape(rows, length + 1))


def _token_stream(
    tokenizer: Tokenizer, documents: Sequence[str], plan: TrainingPlan, shuffle: random.Random
) -> Iterator[int]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    while True:
        texts = [*documents, *_conversations(documents, plan.conversation_share, shuffle)]
        shuffle.shuffle(texts)
        for encoding in tokenizer.encode_batch_fast(texts):
            yield from encoding.ids
            yield end


def _conversations(documents: Sequence[str], share: float, shuffle: random.Random) -> Iterator[str]:
    """Yield some documents' opening lines as questions, with the paragraph that follows as the answer."""
    for document in documents:
        paragraphs = [paragraph for paragraph in document.split("\n\n") if paragraph.strip()]
        if len(paragraphs) > 1 and shuffle.random() < share:
            question = shuffle.randrange(len(paragraphs) - 1)
            yield (
                f"{START}user\n{paragraphs[question].strip().splitlines()[0]}{END}\n"
                f"{START}assistant\n{paragraphs[question + 1].strip()}{END}\n"
            )


def _joined(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch_fast(list(documents))
    return np.concatenate([np.array([*encoding.ids, end], np.int64) for encoding in encodings])


def _windows(tokens: np.ndarray, length: int) -> np.ndarray:
    count = len(tokens) // length
    return tokens[: count * length].reshape(count, length)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int) -> float:
    """Return the mean negative log-likelihood, in nats, of every token of a window but its first."""
    total, count = 0.0, 0
    for rows in torch.from_numpy(_windows(tokens, length)).split(8):
        log_likelihoods = torch.log_softmax(model(input_ids=rows, use_cache=False).logits[:, :-1].float(), -1)
        total -= log_likelihoods.gather(-1, rows[:, 1:, None]).double().sum().item()
        count += rows[:, 1:].numel()
    return total / count


def unigram_perplexity(
    training_tokens: np.ndarray, held_out_tokens: np.ndarray, vocabulary: int, plan: TrainingPlan
) -> float:
    """Return the perplexity of add-one smoothed training frequencies on the tokens the model predicts."""
    counts = np.bincount(training_tokens, minlength=vocabulary) + 1
    log_likelihoods = np.log(counts / counts.sum())
    predicted = _windows(held_out_tokens, plan.sequence_length)[:, 1:]
    return float(np.exp(-log_likelihoods[predicted].mean()))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: Sequence[str], folder: Path) -> None:
    """Write the Hugging Face directory, with the weights in bfloat16, and the held-out text."""
    folder.mkdir(parents=True, exist_ok=True)
    # Chat answers end with END, plain text with END_OF_TEXT.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.token_to_id(BEGIN_OF_TEXT),
        eos_token_id=[tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)],
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: what transformers 5 writes here cannot be read by transformers 4, which
    # TensorRT-LLM's releases pin; this form both can read.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(tokenizer_config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "heldout.txt").write_text(DOCUMENT_SEPARATOR.join(held_out) + "\n", encoding="utf-8")


def _readme(shape: ModelShape, plan: TrainingPlan, perplexities: Perplexities) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"""# Demo model

A Llama with {shape.layers} layers of width {shape.hidden}, {shape.heads} attention heads sharing
{shape.key_value_heads} key-value heads, and a byte-level BPE vocabulary of {shape.vocabulary}. It is real in
every respect but its size: trained, not random, so that a conversion error shows as a worse perplexity.

Made by `recipes/train_demo_model.py` (seed {plan.seed}, {plan.minutes:g} minutes) from the docstrings,
comments and help topics of the standard library of Python {python}. That text is part of Python and under the
PSF licence, as is `heldout.txt`, the part that training did not see; its documents are separated by lines
holding a form feed.

| held-out perplexity, windows of {plan.sequence_length} tokens | |
|---|---|
| this model, bfloat16 weights, float32 arithmetic | {perplexities.model:.2f} |
| token frequencies of the training part | {perplexities.unigram:.2f} |

The schedule follows the clock, so another run gives the same tokenizer but not the same weights. The model
imitates the wording of Python's documentation and knows nothing else. It has seen the chat template only on
paragraphs cut into question and answer, so its replies are well-formed at best.
"""


if __name__ == "__main__":
    sys.exit(main())
