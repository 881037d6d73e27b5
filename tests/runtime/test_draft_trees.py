"""Trees of draft tokens: what their tokens see, and that a step verifies every path as it would verify a chain."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import KeptRanks, sequence
from trtforge.core.features import MOST_NODES
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import SamplingParams
from trtforge.runtime.architecture.positions import ALL
from trtforge.runtime.decoder.batch import mask_of
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.draft_trees import SEES_ALL, TreeShape, path_to, places_of, seen_slots
from trtforge.runtime.scheduling.rows import Row, moves_of
from trtforge.runtime.scheduling.sequence import Draft, Sequence
from trtforge.runtime.scheduling.step_codec import asked_block, asked_moves, decode, encode, encode_moves

Parents = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, most: int = MOST_NODES) -> Parents:
    """The parents of a tree's nodes."""
    count = draw(st.integers(1, most))
    return tuple(draw(st.integers(-1, index - 1)) for index in range(count))


def ancestors(parents: Parents, node: int) -> set[int]:
    """The node and those above it, -1 among them."""
    return {-1} | ({node} | ancestors(parents, parents[node]) if node >= 0 else set())


@settings(deadline=None)
@given(parents=trees(), root=st.integers(0, 200))
def test_a_token_sees_its_ancestors_and_all_before_the_tree(parents: Parents, root: int) -> None:
    bits = seen_slots(parents)
    for node, own in enumerate(bits):
        slot = root + 1 + node
        seen = {slot - k for k in range(min(64, slot + 1)) if own >> (63 - k) & 1}
        wanted = {root + 1 + each for each in ancestors(parents, node)} | set(range(root))
        assert seen == {each for each in wanted if each > slot - 64}
    slots = np.arange(root + 1, root + 1 + len(parents))
    depths = [len(path_to(parents, node)) for node in range(len(parents))]
    assert places_of(slots, np.arange(len(slots)), np.array(bits)).tolist() == [root + depth for depth in depths]
    assert places_of(slots, slots, np.zeros(0, dtype=np.int64)) is slots


def test_tokens_of_a_chain_see_all_slots() -> None:
    assert seen_slots(range(-1, MOST_NODES - 1)) == [SEES_ALL] * MOST_NODES
    assert seen_slots([-1, -1]) == [SEES_ALL, SEES_ALL - 2**62]


@settings(deadline=None)
@given(parents=trees(20), root=st.integers(0, 100))
def test_the_mask_of_torch_hides_what_a_token_does_not_see(parents: Parents, root: int) -> None:
    slots, length = torch.arange(root + 1, root + 1 + len(parents)), root + 1 + len(parents) + 3
    seen = torch.tensor(seen_slots(parents)).unsqueeze(1)
    mask = mask_of(slots.unsqueeze(1), torch.arange(length), torch.float32, ALL, seen)
    for node in range(len(parents)):
        wanted = {root + 1 + each for each in ancestors(parents, node)} | set(range(root))
        assert {int(each) for each in (mask[node] == 0).nonzero()} == wanted


def test_choices_become_nodes_whose_most_likely_path_comes_first() -> None:
    shape = TreeShape.of(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 2)))
    # In order: 0; 0 0; 0 0 0; 0 1; 0 1 2; 1; 1 0.
    assert shape.parents == (-1, 0, 1, 0, 3, -1, 5)
    assert shape.ranks == (0, 0, 0, 1, 2, 1, 0)
    assert shape.depths == (0, 1, 2, 1, 2, 0, 1)
    assert [shape.most(depth) for depth in range(3)] == [2, 2, 3]
    assert shape.followed == (0, 1, 3, 5)
    assert not shape.is_chain
    assert TreeShape.of(((0,), (0, 0))) == TreeShape.chain(2)
    assert shape.within(1) == TreeShape.of(((0,), (1,)))
    assert shape.within(2) == TreeShape.of(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    assert shape.within(3) == shape
    assert TreeShape.chain(3).is_chain


@settings(deadline=None)
@given(parents=trees(20), depth=st.integers(-1, 8))
def test_drafts_that_cannot_be_accepted_are_left_out(parents: Parents, depth: int) -> None:
    whole = Draft(tuple(range(len(parents))), parents=parents)
    found = whole.within(depth)
    assert found.tokens == tuple(node for node in range(len(parents)) if len(path_to(parents, node)) <= depth)
    for place, parent in enumerate(found.parents):
        above = parents[found.tokens[place]]
        assert (found.tokens[parent] if parent >= 0 else -1) == above
    assert Draft((5, 6, 7)).within(depth).tokens == (5, 6, 7)[: max(0, depth)]


@settings(deadline=None)
@given(parents=trees(12), drafts=st.lists(st.integers(0, 2), min_size=12, max_size=12), data=st.data())
def test_a_row_accepts_what_follows_and_moves_it_behind_the_others(
    parents: Parents, drafts: list[int], data: st.DataObject
) -> None:
    own = tuple(drafts[: len(parents)])
    state = sequence([5] * 9)
    state.table.blocks = data.draw(st.permutations(range(12)))[:8]
    row = Row(state, 8, 1, True, drafts=own, parents=parents)
    slots = {position: state.table.blocks[position // 4] * 4 + position % 4 for position in range(32)}
    memory = {slots[9 + index]: index for index in range(len(own))}
    path: list[int] = []
    while True:
        token = data.draw(st.integers(0, 2))
        at = path[-1] if path else -1
        followers = [index for index, parent in enumerate(parents) if parent == at and own[index] == token]
        assert row.accept(token) == bool(followers)
        if not followers:
            break
        path.append(followers[0])
        moves = moves_of([row], len(path) - 1, 4)
        assert len(moves) == (0 if path[-1] == len(path) - 1 else 2)
        for source, target in moves.reshape(-1, 2).tolist():
            memory[target] = memory[source]
    assert row.path == path
    assert row.next_length == 10 + len(path)
    assert [memory[slots[9 + depth]] for depth in range(len(path))] == path


def test_steps_and_moves_reach_the_other_ranks() -> None:
    first, second, third = (sequence(tokens) for tokens in ([3, 4, 5], [6, 7], [8, 9]))
    for index, each in enumerate((first, second, third)):
        each.table.blocks = [index]
    rows = [
        Row(first, 2, 1, True, drafts=(20, 21, 22), parents=(-1, -1, 1)),
        Row(second, 1, 1, True, drafts=(30, 31)),
        Row(third, 0, 2, True),
    ]
    step = Step.of_rows(rows)
    assert step.tokens.tolist() == [5, 20, 21, 22, 7, 30, 31, 8, 9]
    assert step.starts.tolist() == [2, 3, 4, 5, 1, 2, 3, 0]
    assert step.seen.tolist() == [SEES_ALL, *seen_slots((-1, -1, 1)), SEES_ALL, SEES_ALL, SEES_ALL, SEES_ALL]
    row_of, slots = step.positions()
    assert slots.tolist() == [2, 3, 4, 5, 1, 2, 3, 0, 1]
    assert places_of(slots, row_of, step.seen).tolist() == [2, 3, 3, 4, 1, 2, 3, 0, 1]
    made = decode(np.concatenate([encode(step), np.zeros(5, dtype=np.int64)]))
    assert made.seen.tolist() == step.seen.tolist()
    assert made.starts.tolist() == step.starts.tolist()
    assert len(Step.of_rows(rows[1:]).seen) == 0
    moves = np.array([9, 4, 70, 5])
    told = np.concatenate([encode_moves(moves), np.zeros(3, dtype=np.int64)])
    found = asked_moves(told)
    assert found is not None
    assert found.tolist() == [9, 4, 70, 5]
    assert asked_block(told) is None
    assert asked_moves(encode(step)) is None


class TreeOracle:
    """Proposes trees: a path of what transformers continues with, as far as `right` says, and other tokens beside it.

    Which nodes the path takes depends on the position. `tree`: parents of the nodes.
    """

    worker_pids: tuple[int, ...] = ()

    def __init__(self, answers: dict[Tokens, Tokens], parents: Parents, seed: int) -> None:
        self._answers, self._parents, self._seed = answers, parents, seed

    def draft(self, sequences: list[Sequence]) -> None:
        for each in sequences:
            answer, made = self._answers[each.request.prompt], each.generated
            random = np.random.default_rng([self._seed, made])
            tokens = [131 - 1 - node for node in range(len(self._parents))]
            at = -1
            for right in answer[made : made + int(random.integers(0, 5))]:
                below = [node for node, parent in enumerate(self._parents) if parent == at]
                if not below:
                    break
                at = int(random.choice(below))
                tokens[at] = right
            each.draft = Draft(tuple(tokens), parents=self._parents)

    def observe(self, rows: list[Row], logits: object) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("layout", "kernels"), [("one", True), ("one", False), ("tp2", True)])
def test_answers_are_those_without_drafts_whatever_the_tree(
    llama: LlamaForCausalLM,
    prompts: list[list[int]],
    expected: list[Tokens],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    kernels: bool,
) -> None:
    """Under any schedule, with log probabilities of another engine's answers."""
    if not kernels:
        monkeypatch.setenv("TRTFORGE_KERNELS", "torch")
    path = tmp_path_factory.mktemp("trees")
    checkpoint = write_checkpoint(llama, path / "checkpoint", Layout(tp=2 if layout == "tp2" else 1))
    source = open_engine(write_engine(checkpoint, path / "engine", tokens_per_block=4, max_num_tokens=64))
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (34, 80)}
    scored = requests_for(prompts, sampling=SamplingParams(return_log_probs=True))
    with Engine(source, ranks[80], EngineOptions(chunked_context=True)) as engine:  # type: ignore[arg-type]
        plain = generate_with(engine, scored)
    accepted = 0

    @settings(max_examples=40 if layout == "one" else 10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 7), min_size=1, max_size=4),
        parents=trees(12),
        seed=st.integers(0, 1000),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([34, 80]),
        batch=st.integers(1, 4),
    )
    def check(
        chosen: list[int],
        parents: Parents,
        seed: int,
        policy: SchedulerPolicy,
        reuse: bool,
        blocks: int,
        batch: int,
    ) -> None:
        nonlocal accepted
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        drafter = TreeOracle(answers, parents, seed)
        asked = requests_for([prompts[index] for index in chosen], sampling=SamplingParams(return_log_probs=True))
        with Engine(source, ranks[blocks], options, drafter) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
            found = engine.statistics()
        assert [each.tokens for each in made] == [expected[index] for index in chosen]
        for each, index in zip(made, chosen, strict=True):
            assert each.log_probs == pytest.approx(plain[index].log_probs, abs=1e-4)
        assert found.kv_blocks_used == 0
        assert found.accepted_tokens <= found.drafted_tokens
        accepted += found.accepted_tokens

    check()
    for each in ranks.values():
        each.end()
    assert accepted > 0
