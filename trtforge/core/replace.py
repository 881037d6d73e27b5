"""Replaces text files atomically: a reader, or a run after a kill, finds either the old or the new text."""

from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str, draft: Path | None = None) -> None:
    """Write `text` to a draft beside `path` and move it there. Raises OSError.

    `draft`: a path unique to this process, if several processes may write at once.
    """
    draft = draft or path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
