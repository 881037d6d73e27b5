"""Which endpoints there are, which are open, and that a path cannot be written around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.launch.doors import DOORS
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal
from trtforge.serve.front.routes import find_route

BEHIND = [
    ("GET", "/v2/models/stats", "statistics"),
    ("GET", "/v2/models/ensemble/stats", "statistics"),
    ("GET", "/v2/models/ensemble/versions/1/stats", "statistics"),
    ("GET", "/v2/models/ensemble/config", "model-config"),
    ("POST", "/v2/repository/index", "model-repository"),
    ("POST", "/v2/repository/models/ensemble/load", "model-repository"),
    ("POST", "/v2/repository/models/ensemble/unload", "model-repository"),
    ("GET", "/v2/trace/setting", "trace"),
    ("POST", "/v2/models/ensemble/trace/setting", "trace"),
    ("GET", "/v2/logging", "logging"),
    ("POST", "/v2/logging", "logging"),
    ("GET", "/v2/systemsharedmemory/status", "shared-memory"),
    ("POST", "/v2/systemsharedmemory/region/x/register", "shared-memory"),
    ("POST", "/v2/cudasharedmemory/unregister", "shared-memory"),
]


def status(method: str, path: str, opened: tuple[str, ...] = ()) -> int:
    try:
        find_route(method, path, opened, FrontLimits())
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(("method", "path", "door"), BEHIND)
def test_doors_are_closed_unless_opened(method: str, path: str, door: str) -> None:
    assert status(method, path) == 403
    assert status(method, path, tuple(other for other in DOORS if other != door)) == 403
    assert status(method, path, (door,)) == 200


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v2", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2/models/ensemble", 200),
        ("GET", "/v2/models/my.model-1/versions/1/ready", 200),
        ("POST", "/v2/models/ensemble/generate?x=1", 200),
        ("GET", "/v2/models/ensemble/generate", 405),
        ("DELETE", "/v2/models/ensemble", 405),
        ("POST", "/v2/health/ready", 405),
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("GET", "/v2/", 404),
        ("POST", "/invocations", 404),
        ("POST", "/v2/models/ensemble/versions/x/infer", 404),
        ("GET", "/v2/../v2/logging", 400),
        ("GET", "/v2/./logging", 400),
        ("GET", "//v2/logging", 400),
        ("GET", "/v2/%6cogging", 400),
        ("GET", "http://host/v2", 400),
        ("OPTIONS", "*", 400),
        ("GET", "/v2/models/" + "a" * 2000, 414),
    ],
)
def test_status_of_a_path(method: str, path: str, expected: int) -> None:
    assert status(method, path) == expected


@given(st.text(alphabet="v2/.%-_modelsloggingstatsconfig", max_size=40))
def test_no_spelling_gets_past_a_door(tail: str) -> None:
    path = f"/v2/{tail}"
    if status("GET", path) == 200:
        assert not any(word in path.split("/") for word in ("..", "logging", "trace", "repository"))
        assert not path.endswith(("/stats", "/config")) or path.count("/") < 4
