"""The served OpenAPI description, and requests made from it: none breaks the server, none that it rejects is taken."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.support.live_server import LiveServer
from tests.unit.server.test_fuzz import BASES

ALLOWED = {200, 400, 404, 405, 413, 429, 501}


@pytest.fixture(scope="module")
def description(server: LiveServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.http.get("/openapi.json").json()
    return answer


def body_of(description: dict[str, Any], path: str) -> Any:
    """The schema of a route's body, None when it takes none; its references resolve by themselves."""
    operation = description["paths"][path].get("post", {})
    if "requestBody" not in operation:
        return None
    return {**operation["requestBody"]["content"]["application/json"]["schema"], "components": description["components"]}


def test_description_names_every_route_and_their_bodies(description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/tokenize", "/apply-template"):
        schema = body_of(description, path)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$ref"] in {f"#/components/schemas/{name}" for name in description["components"]["schemas"]}
    assert description["paths"]["/health"]["get"]["summary"]
    assert body_of(description, "/lora-adapters") is None


def run(server: LiveServer, description: dict[str, Any], examples: int) -> int:
    """Run examples over all operations, half of them valid ones; gives how many there were."""
    schema = schemathesis.openapi.from_dict(description)
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    strategies: list[Any] = []
    for operation, mode in itertools.product(operations, modes):
        if operation.body or mode is GenerationMode.POSITIVE:
            strategies.append(operation.as_strategy(generation_mode=mode))
    count = 0

    @given(case=st.one_of(strategies))
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def each(case: Any) -> None:
        nonlocal count
        count += 1
        response = case.call(base_url=server.url, timeout=30)
        assert response.status_code in ALLOWED, (case.method, case.formatted_path, case.body, response.text)
        if response.status_code >= 400 and "json" in str(response.headers.get("content-type", "")):
            assert response.json()["error"]["message"]

    each()
    return count


def test_requests_made_from_the_description_never_break_the_server(server: LiveServer, description: dict[str, Any]) -> None:
    assert run(server, description, 100) >= 100
    server.assert_idle_soon()
    server.assert_alive()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_thousand_requests_made_from_the_description(server: LiveServer, description: dict[str, Any]) -> None:
    assert run(server, description, 2000) >= 2000
    server.assert_idle_soon()
    server.assert_alive()


def test_what_the_description_rejects_is_a_4xx(server: LiveServer, description: dict[str, Any]) -> None:
    refused = 0
    for path in description["paths"]:
        schema = body_of(description, path)
        if schema is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        fields = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]["properties"]
        base = BASES.get(path, BASES["/v1/chat/completions"])
        for name in fields if validator.is_valid(base) else ():
            for value in ({"x": [True]}, [[[1.5]]], "x\x00", 1.5, True, -(2**70)):
                body = base | {name: value}
                if validator.is_valid(body):
                    continue
                response: httpx.Response = server.http.post(path, json=body)
                assert 400 <= response.status_code < 500, (path, name, value, response.text)
                refused += 1
    assert refused > 1000
    server.assert_alive()
