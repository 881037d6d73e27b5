"""schemathesis: requests made of OpenAI's own types, right and wrong ones, never fail the server."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from tests.clients.conftest import Served
from tests.clients.openapi import document

_SCHEMA = schemathesis.openapi.from_dict(document())


@_SCHEMA.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_fails_the_server(served: Served, case: schemathesis.Case) -> None:
    response = case.call(base_url=served.url, timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
