"""A request while the engine works on it: its tokens, how many of them are computed, and its KV blocks."""

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.requests import FinishReason, GenerationRequest, Output, PromptLogProbs, TopLogProbs
from trtforge.runtime.scheduling.block_table import BlockTable, salt_of
from trtforge.runtime.scheduling.draft_trees import within
from trtforge.runtime.scheduling.retention import SequenceRetention
from trtforge.runtime.scheduling.virtual_tokens import VirtualTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens of a sequence, which a step verifies.

    `distributions`: those that the tokens were drawn from, float32 (tokens, vocabulary); None if not drawn.
    `threshold`: see `DraftTokens`; 0 for random numbers. `parents`: of a tree, see `draft_trees`; () for a chain.
    """

    tokens: tuple[int, ...] = ()
    distributions: "Tensor | None" = None
    threshold: float = 0.0
    parents: tuple[int, ...] = ()

    def first(self, count: int) -> "Draft":
        """The first `count` tokens."""
        return self if count >= len(self.tokens) else self._part(slice(count))

    def within(self, depth: int) -> "Draft":
        """The draft's tokens at most `depth` tokens after the sequence's last. Only for tokens that were not drawn."""
        if not self.parents:
            return self.first(max(0, depth))
        if len(self.parents) <= depth:
            return self
        kept, parents = within(self.parents, depth)
        return Draft(tuple(self.tokens[node] for node in kept), parents=parents)

    def after(self, count: int) -> "Draft":
        """A chain without its first `count` tokens."""
        return self if not count else self._part(slice(count, None))

    def _part(self, part: slice) -> "Draft":
        own = None if self.distributions is None else self.distributions[part]
        return Draft(self.tokens[part], own, self.threshold, self.parents[part])


@dataclass(eq=False, slots=True)
class Group:
    """Sequences of one request that advance together: one until the prompt is computed, then `width` members."""

    width: int
    members: "list[Sequence]" = field(default_factory=list)

    @property
    def formed(self) -> bool:
        """Whether all members exist."""
        return len(self.members) == self.width


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state, owned by the engine's thread. `order`: order of arrival; `limit`: maximum length of prompt and
    output; `plain`: sampling is the argmax of the unmodified logits; `candidates`: number of most likely tokens whose
    logits must be right, 0 for all; `draft`: proposed next tokens; `scheduled_ns`: when it first ran, by
    `time.monotonic_ns`, 0 before; `scored`: number of prompt tokens whose logits were used;
    `context_logits`, `generation_logits`: not handed out yet; `virtual`: rows of a prompt table;
    `cached_tokens`: number of prompt tokens that were in the cache when the request first ran;
    `failure`: why no token can be chosen, such as a failed logits processor; `to_restore`: number of blocks that its
    prefix lacked when some were last restored; None if none was since it last ran.

    The keys and values of the first `computed` tokens are in the cache; those of the other tokens, the last generated
    one included, are still to be computed.
    """

    request: GenerationRequest
    order: int
    limit: int
    on_output: Callable[[Output], None]
    tokens: list[int]
    plain: bool
    candidates: int
    computed: int = 0
    draft: Draft = Draft()
    drafted: int = 0
    accepted: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    finish_reason: FinishReason | None = None
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    cached_tokens: int = 0
    allocated_blocks: int = 0
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: list[TopLogProbs] = field(default_factory=list)
    prompt_reported: bool = False
    group: Group | None = None
    scheduled_ns: int = 0
    scored: int = 0
    context_logits: bytearray = field(default_factory=bytearray)
    generation_logits: bytearray = field(default_factory=bytearray)
    virtual: VirtualTokens | None = None
    failure: RequestError | None = None
    to_restore: int | None = None

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        order: int,
        max_seq_len: int,
        on_output: Callable[[Output], None],
        virtual: VirtualTokens | None = None,
    ) -> "Sequence":
        """A new sequence; its output is limited so that prompt and output fit `max_seq_len`."""
        limit = min(len(request.prompt) + request.most_new, max_seq_len)
        plain = request.sampling.plain and not request.bad_words and not request.logits_processors
        tokens = list(request.prompt if virtual is None else virtual.prompt)
        request = request if virtual is None else replace(request, prompt_table=None)  # its rows are in `virtual`
        sequence = cls(request, order, limit, on_output, tokens, plain, candidates_of(request), virtual=virtual)
        salt = salt_of(request.lora_task_id, request.cache_salt) + (b"" if virtual is None else virtual.salt)
        kept = request.kv_retention
        retention = None if kept is None else SequenceRetention.of(kept, len(request.prompt))
        sequence.table = BlockTable(
            salt=salt, retention=retention, stored=request.context_only, lora_id=request.lora_task_id
        )
        return sequence

    @property
    def begun(self) -> bool:
        """Whether it has ever run: it is running or paused."""
        return self.scheduled_ns > 0

    def begin(self) -> None:
        """Record the time of its first run."""
        self.scheduled_ns = self.scheduled_ns or time.monotonic_ns()
        self.to_restore = None

    def restores_in_parts(self, blocks: int, most: int) -> bool:
        """Whether the first `most` of the `blocks` that its prefix lacks are restored now, and the others later.

        Not if it lacks as many as before: then others overwrite blocks as fast as they are restored.
        """
        if most >= blocks or (self.to_restore is not None and blocks >= self.to_restore):
            return False
        self.to_restore = blocks if most else self.to_restore
        return True

    @property
    def precedence(self) -> tuple[float, int]:
        """Sort key: the highest priority first, then by arrival."""
        return -self.request.priority, self.order

    @property
    def adapter(self) -> int:
        """Task id of its LoRA adapter; 0 without one."""
        return self.request.lora_task_id or 0

    @property
    def draws_at(self) -> tuple[int, int]:
        """Seed and position that determine the random numbers for its next token."""
        return self.request.sampling.seed or 0, self.generated

    @property
    def held_back(self) -> bool:
        """Whether it belongs to a group, which samples only for all members together."""
        return self.group is not None and self.group.formed

    @property
    def members_to_come(self) -> int:
        """Number of group members that will be added when its prompt is computed."""
        return 0 if self.group is None else self.group.width - len(self.group.members)

    @property
    def scores_prompt(self) -> bool:
        """Whether logits are still wanted for tokens of the prompt other than the last."""
        wanted = self.request.sampling.prompt_log_probs or self.request.context_logits
        return wanted and self.scored < len(self.request.prompt) - 1

    @property
    def follows_logits(self) -> bool:
        """Whether its next token depends on its logits only, not on earlier tokens, and nothing else is wanted."""
        request = self.request
        if request.guide is not None or self.group is not None or self._keeps_logits:
            return False
        return self.plain or not (request.sampling.remembers or request.bad_words or request.logits_processors)

    @property
    def remaining(self) -> int:
        """Number of tokens whose keys and values are not in the cache: 1 in the generation phase."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """Maximum number of tokens to draft now. The last output token is never fed back."""
        return self.most_cached - len(self.tokens)

    @property
    def most_cached(self) -> int:
        """Maximum number of cached tokens: the last generated token is never fed back."""
        return self.limit - 1

    def slots(self, size: int) -> int:
        """Maximum number of slots for its tokens and drafts, in blocks of `size` tokens. A tree has more nodes than its
        longest path has tokens, so the nodes may fill the last block."""
        return -(-self.most_cached // size) * size if self.draft.parents else self.most_cached

    def finish_with(self, token: int) -> FinishReason | None:
        """Append a generated token (not an end id); returns the finish reason if the sequence ends with it."""
        request = self.request
        if token in request.end_ids:
            return "end_id"
        reason = self.why_ends(token)
        self.tokens.append(token)
        return reason

    def why_ends(self, token: int) -> FinishReason | None:
        """The finish reason if `token` is the next token."""
        if token in self.request.end_ids:
            return "end_id"
        if self.request.stop_words and self.ends_with_stop_word(token):
            return "stop_word"
        return "length" if len(self.tokens) + 1 >= self.limit else None

    @property
    def _keeps_logits(self) -> bool:
        return self.request.context_logits or self.request.generation_logits

    def keep_logits(self, logits: "Tensor", index: int) -> None:
        """Keep row `index` of logits (rows, vocabulary), the source of its next token, if the request wants it."""
        if not self._keeps_logits:
            return
        request, data = self.request, logits[index].cpu().numpy().tobytes()
        if request.context_logits and not self.generated:
            self.context_logits += data
        if request.generation_logits:
            self.generation_logits += data

    def _taken_logits(self, *, context: bool, token: bool) -> tuple[bytes, bytes]:
        """Logits to hand out now: of the prompt, and of an output token (end ids are not output)."""
        if not self._keeps_logits:
            return b"", b""
        found = bytes(self.context_logits) if context else b"", bytes(self.generation_logits) if token else b""
        self.context_logits.clear()
        self.generation_logits.clear()
        return found

    def output(
        self,
        reason: FinishReason | None = None,
        token: int | None = None,
        log_prob: float = 0.0,
        top: TopLogProbs = (),
        error: ForgeError | None = None,
    ) -> Output:
        """The request's next output; `token`: the new token, if it belongs to the output."""
        sampling = self.request.sampling
        asked = sampling.return_log_probs and token is not None
        prompt = None
        if sampling.prompt_log_probs and not self.prompt_reported and not self.scores_prompt:
            self.prompt_reported = True
            prompt = PromptLogProbs(tuple(self.prompt_log_probs), tuple(self.prompt_top))
        ends_at_once = reason == "end_id" and not self.generated
        context, generation = self._taken_logits(context=token is not None or ends_at_once, token=token is not None)
        return Output(
            self.request.request_id,
            () if token is None else (token,),
            reason,
            error,
            log_probs=(log_prob,) if asked else (),
            cumulative_log_prob=self.cumulative_log_prob,
            reused_blocks=self.reused_blocks,
            allocated_blocks=self.allocated_blocks,
            cached_tokens=self.cached_tokens if self.begun else None,
            top_log_probs=(top,) if asked and sampling.top_log_probs else (),
            prompt_log_probs=prompt,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            context_logits=context,
            generation_logits=generation,
            scheduled_ns=self.scheduled_ns,
        )

    def ends_with_stop_word(self, token: int) -> bool:
        """Whether the output, followed by `token`, ends with a stop word."""
        made = self.generated + 1
        return any(
            0 < len(word) <= made
            and word[-1] == token
            and tuple(self.tokens[len(self.tokens) + 1 - len(word) :]) == word[:-1]
            for word in self.request.stop_words
        )


def candidates_of(request: GenerationRequest) -> int:
    """`Sequence.candidates` for this request."""
    whole = request.guide is not None or request.bad_words or request.context_logits or request.generation_logits
    searches = request.beams is not None and request.beams.width > 1
    return 0 if whole or searches or request.logits_processors else request.sampling.candidates


def insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Insert a sequence by precedence, after the members of its group."""
    insort(sequences, sequence, key=lambda each: each.precedence)
