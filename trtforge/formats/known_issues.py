"""Defects of releases, reported upstream: warnings from `release_data/known-issues.json`."""

from functools import cache
from pathlib import Path

from trtforge.core.config_model import Config
from trtforge.core.json_text import REINSTALL, read_json_object
from trtforge.formats.releases import Release

_FILE = Path(__file__).parent / "release_data" / "known-issues.json"


class KnownIssue(Config):
    """A defect of a feature in a range of releases, both inclusive; `until` None: not fixed."""

    feature: str
    since: str
    until: str | None
    says: str
    source: str


class _File(Config):
    schema_version: int
    subject: str
    how_to_read: str
    issues: tuple[KnownIssue, ...]


def known_issues(feature: str, release: Release) -> tuple[KnownIssue, ...]:
    """The known issues of a feature, by its name in `engine.features` or `serving`, in a release."""
    return tuple(one for one in _issues() if one.feature == feature and release.within(one.since, one.until))


@cache
def _issues() -> tuple[KnownIssue, ...]:
    return _File.parse(read_json_object(_FILE, hint=REINSTALL), str(_FILE)).issues
