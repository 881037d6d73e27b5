"""Tensors that a request brings for itself: a LoRA adapter, draft tokens, a prompt table."""

import numpy as np
from input_values import INT32_MAX, InputValues
from responder import RequestFailed

from trtforge.engine_process.requests import DraftTokens, PromptTable, SentAdapter

ADAPTER = ("lora_weights", "lora_config")
DRAFTS = ("draft_input_ids", "draft_logits", "draft_acceptance_threshold")
TABLE = ("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids")


def sent_adapter(values: InputValues, item: int) -> SentAdapter | None:
    """An adapter in TensorRT-LLM's tensors: (prompts, modules, values), and (prompts, modules, 3 or 4)."""
    if not any(name in values for name in ADAPTER):
        return None
    weights, config = (values.array(name) for name in ADAPTER)
    for name, array, kinds in ((ADAPTER[0], weights, "f"), (ADAPTER[1], config, "i")):
        if array.ndim != 3 or len(array) <= item or array.dtype.kind not in kinds or array.dtype.itemsize > 4:
            raise values.refused(
                name, f"{array.dtype.name} {list(array.shape)}", "a tensor [prompts, modules, values] of its data type"
            )
    if weights.shape[1] != config.shape[1]:
        raise RequestFailed(
            f"{values.shown(ADAPTER[0])} has {weights.shape[1]} modules, {values.shown(ADAPTER[1])} {config.shape[1]}"
        )
    own = np.ascontiguousarray(weights[item])
    rows = tuple(tuple(row) for row in config[item].tolist())
    return SentAdapter(rows, "float16" if own.dtype.itemsize == 2 else "float32", own.shape[1], own.tobytes())


def draft_tokens(values: InputValues, item: int, vocab_size: int) -> DraftTokens | None:
    """Draft tokens in TensorRT-LLM's tensors: (prompts, tokens), (prompts, tokens, vocabulary) and (prompts, 1)."""
    ids, logits, least = DRAFTS
    threshold = values.share(least, item, 0.0) or 0.0
    if ids not in values:
        if logits in values or threshold:
            given = logits if logits in values else least
            raise RequestFailed(f"{values.shown(ids)} is missing: {values.shown(given)} is about these tokens")
        return None
    tokens = values.of_item(ids, item).reshape(-1)
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise RequestFailed(f"{values.shown(ids)} holds the id {wrong[0]}; ids are from 0 to {vocab_size - 1}")
    if logits not in values:
        return DraftTokens(tuple(tokens.tolist()), threshold=threshold)
    own = values.of_item(logits, item)
    if own.shape != (tokens.size, vocab_size) or own.dtype.kind != "f":
        raise values.refused(logits, f"{own.dtype.name} {list(own.shape)}", f"numbers {[tokens.size, vocab_size]}")
    values.finite(logits)
    return DraftTokens(tuple(tokens.tolist()), own.astype(np.float32).tobytes(), threshold)


def prompt_table(values: InputValues, item: int) -> PromptTable | None:
    """A table [prompts, rows, hidden size], whose number of rows is `prompt_vocab_size`, and the extra ids of a prompt.

    As `getPromptTuningConfigFromTensors` of TensorRT-LLM's Triton backend (inflight_batcher_llm/src/utils.cc), which
    neither compares the number of rows nor keeps extra ids of another length.
    """
    name, size, extra = TABLE
    if name not in values:
        for other in (size, extra):
            if other in values:
                raise RequestFailed(f"{values.shown(other)} came without {values.shown(name)}")
        return None
    table = values.array(name)
    if table.ndim != 3 or len(table) <= item or table.dtype.kind != "f" or table.dtype.itemsize > 4:
        raise values.refused(
            name, f"{table.dtype.name} {list(table.shape)}", "a tensor [prompts, rows, hidden size] of its data type"
        )
    own = np.ascontiguousarray(table[item])
    if len(own) != (rows := values.integer(size, item, len(own), 1, INT32_MAX)):
        raise RequestFailed(f"{values.shown(name)} has {len(own)} rows, {values.shown(size)} is {rows}")
    ids: tuple[int, ...] = ()
    if extra in values:
        length = values.integer("input_lengths", item, None, 1, INT32_MAX)
        given = values.array(extra)
        if given.ndim != 2 or len(given) <= item or given.dtype.kind not in "iu" or given.shape[1] < length:
            raise values.refused(extra, f"{given.dtype.name} {list(given.shape)}", "an id for each token of the prompt")
        ids = tuple(given[item, :length].tolist())
    return PromptTable(rows, own.shape[1], "float16" if own.dtype.itemsize == 2 else "float32", own.tobytes(), ids)
