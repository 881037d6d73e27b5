"""What the stand-in is told to do, and what it notes."""

import json
import os
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent.parent


def behaviour(key: str, rank: int) -> Any:
    """What `behaviour.json` says under `key` for a rank; None where it says nothing."""
    return json.loads((SITE / "behaviour.json").read_text()).get(key, {}).get(str(rank))


def note(call: str, **values: object) -> None:
    """Append a call to the record; one write, so that ranks side by side do not mix."""
    line = json.dumps({"call": call, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid(), **values})
    with (SITE / "calls.jsonl").open("a") as record:
        record.write(line + "\n")
