"""docs/runtime.md: what it says of the loop's size, files, phases and example is so."""

import json
import re
from pathlib import Path

from tests.runtime.test_engine import requests_for
from trtforge.runtime.scheduling.batch_limits import BatchLimits
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.trace import PHASES

PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"
RUNTIME = Path(__file__).parents[2] / "trtforge" / "runtime"
LOOP = (RUNTIME / "engine.py", *(RUNTIME / "scheduling" / f"{name}.py" for name in ("scheduler", "blocks", "batch")))
MOST_LINES = 1200


def test_the_loop_is_read_in_one_sitting() -> None:
    text = PAGE.read_text()
    linked = {(PAGE.parent / path).resolve() for path in re.findall(r"\]\((\.\./[^)]+)\)", text)}
    assert linked == {*LOOP, RUNTIME / "scheduling" / "sequence.py"}
    assert f"{MOST_LINES:,} lines" in text
    assert sum(len(path.read_text().splitlines()) for path in LOOP) < MOST_LINES
    assert [path.name for path in LOOP if re.search(r"^(import|from) torch", path.read_text(), re.MULTILINE)] == [
        "engine.py"
    ]


def test_its_phases_and_its_event_are_those_of_a_trace() -> None:
    text = PAGE.read_text()
    picture = text.split("```")[1]
    assert [word for word in re.findall(r"│   (\w+) ", picture) if word in PHASES] == list(PHASES)
    event = json.loads(text.split("```json")[1].split("```")[0])
    assert event["args"].keys() == {"rows", "sampled", "pauses", "tokens", "blocks", "sequences"}


def test_its_example_is_what_the_scheduler_does() -> None:
    blocks = BlockManager(64, 4, reuse=False)
    limits = BatchLimits(max_batch_size=8, max_num_tokens=16, max_input_len=32, max_seq_len=64)
    scheduler = Scheduler(limits, blocks, chunked_context=True)
    prompts = [[0] * 5, [0] * 20, [0] * 3]
    for order, request in enumerate(requests_for(prompts)):
        scheduler.add(Sequence.of(request, order, 64, lambda output: None))
    rows_of_page = []
    for number in (1, 2, 3):
        rows = sorted(scheduler.schedule(), key=lambda row: row.sequence.order)
        cells = []
        for row in rows:
            scheduler.complete(row)
            if row.samples:
                row.sequence.tokens.append(0)
            last = row.start + row.count - 1
            computed = f"{row.start}" if row.count == 1 else f"{row.start}–{last}"
            cells.append(computed + (", samples" if row.samples else ""))
        rows_of_page.append(f"| {number} | {' | '.join(cells)} | {sum(row.count for row in rows)} |")
    assert "\n".join(rows_of_page) in PAGE.read_text()
