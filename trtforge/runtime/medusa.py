"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) as a drafter.

Head i predicts the token i + 2 positions after the one whose final hidden state it reads; the most likely token of each
head forms a chain. With `choices`, likely tokens of each head form a tree, as in TensorRT-LLM
(tensorrt_llm/models/medusa/model.py, tensorrt_llm/runtime/medusa_utils.py).
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.formats.medusa import MEDUSA_FILE, read_medusa
from trtforge.formats.shards import RowReader
from trtforge.models.torch_tensors import all_finite, read_tensor
from trtforge.runtime.decoder.logits import most_likely_few
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.scheduling.draft_trees import TreeShape
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence


class HiddenStates(Protocol):
    """Ranks that keep the last input of their LM head."""

    def last_hidden(self) -> Tensor:
        """(wanted rows, hidden) of the last step, after the final norm."""


class MedusaDrafter:
    """Proposes the most likely token of each head, or a tree of likely ones."""

    worker_pids: tuple[int, ...] = ()

    def __init__(
        self, directory: Path, sizes: tuple[int, int], feature: MedusaFeature, place: Placement, ranks: HiddenStates
    ) -> None:
        """`directory`: of the heads; `sizes`: hidden size and vocabulary. Raises ForgeError."""
        self._ranks = ranks
        self._tree = None if feature.choices is None else TreeShape.of(feature.choices)
        found = read_medusa(directory, *sizes)
        with RowReader() as reader:

            def read(name: str) -> Tensor:
                tensor = read_tensor(reader, found.tensors[name])
                if not all_finite(tensor.float()):
                    raise ForgeError(
                        f"{directory / MEDUSA_FILE}: {name} has numbers that are not finite", hint="Train it again."
                    )
                return tensor.to(place.device, place.dtype)

            self._heads = [
                (
                    [
                        (read(f"{head}.{layer}.linear.weight"), read(f"{head}.{layer}.linear.bias"))
                        for layer in range(found.layers)
                    ],
                    read(f"{head}.{found.layers}.weight"),
                )
                for head in range(min(found.heads, feature.used_heads))
            ]
        self._states: dict[Sequence, tuple[Row, Tensor]] = {}
        """Each sequence's last row that sampled, and the hidden states it sampled from: of the row's last token and its
        drafts."""

    def draft(self, sequences: list[Sequence]) -> None:
        """See Drafter. A sequence gets no draft if the hidden state of its last token is unknown."""
        known: list[Sequence] = []
        states: list[Tensor] = []
        for sequence in sequences:
            sequence.draft = Draft()
            row, hidden = self._states.get(sequence, (None, None))
            if row is not None and hidden is not None and row.next_length == len(sequence.tokens):
                known.append(sequence)
                states.append(hidden[row.at + 1])
        if known:
            parents = () if self._tree is None else self._tree.parents
            tokens = self._proposed(torch.stack(states))
            for sequence, drafts in zip(known, tokens, strict=True):
                sequence.draft = Draft(tuple(drafts), parents=parents).within(sequence.room)

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""
        if logits is None:
            return
        hidden = self._ranks.last_hidden()
        end = 0
        for row in rows:
            end += row.wanted
            if row.samples:
                start = end - 1 - len(row.drafts)
                self._states[row.sequence] = row, hidden[start:end].clone()

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._states.pop(sequence, None)

    def close(self) -> None:
        """See Drafter."""

    @torch.inference_mode()
    def _proposed(self, hidden: Tensor) -> list[list[int]]:
        """The draft tokens for each of the hidden states (rows, hidden)."""
        chosen = []
        for depth, (layers, lm_head) in enumerate(self._heads):
            x = hidden
            for weight, bias in layers:
                x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
            count = 1 if self._tree is None else self._tree.most(depth)
            chosen.append(most_likely_few((x @ lm_head.t()).float(), count))
        if self._tree is None:
            return torch.cat(chosen, dim=1).tolist()
        nodes = zip(self._tree.depths, self._tree.ranks, strict=True)
        return torch.stack([chosen[depth][:, rank] for depth, rank in nodes], dim=1).tolist()
