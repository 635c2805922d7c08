"""Generated requests after /openapi.json: no 500, replies as described, keys never ignored.

Hundreds of them, or thousands with --long.
"""

from collections import Counter

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

KEY = "fuzz-0123456789abcdef"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
STRANGER = {"Authorization": "Bearer wrong"}
# Removing models would end the run, and pulls take processes; both are tested elsewhere.
LEFT_OUT = {"/api/delete", "/api/pull", "/models/pull", "/models/{id}"}
CASES_WITH_BODY, CASES_WITHOUT = 5, 2
# With --long: more than 2,500 requests.
TIMES_AS_MANY = 16
MODELS = {"/embeddings": "all-minilm", "/v1/embeddings": "all-minilm", "/api/embed": "all-minilm"}
CHECKED = ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
# Long enough for an answer to begin and for an embedding to end, so that thousands take minutes.
DEADLINE_MS = "80"


@pytest.fixture(scope="module")
def fuzzed(quick_models):
    with start_node(NPU_NODE_API_KEYS=KEY, **quick_models) as node:
        yield node


@pytest.fixture(scope="module")
def operations(fuzzed):
    # Here, since every worker imports this file, and one of them runs it.
    import schemathesis

    document = requests.get(fuzzed.url + "/openapi.json", headers=AUTHORISED, timeout=10).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=fuzzed.url)
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in LEFT_OUT]


def send(session, case, headers, known_model):
    """Send a case with a short deadline; half of them name a model that there is."""
    case.headers = {**(case.headers or {}), "X-Request-Timeout-Ms": DEADLINE_MS}
    if known_model and isinstance(case.body, dict) and "model" in case.body:
        # Without keep_alive, which would unload the models over and over.
        body = {name: value for name, value in case.body.items() if name != "keep_alive"}
        case.body = body | {"model": MODELS.get(case.operation.path, "smollm2")}
    # Not among the case's headers: schemathesis takes the key out of some of its negative cases.
    session.auth = lambda request: request.headers.update(headers) or request
    return case.call(session=session, timeout=60)


def is_open(operation):
    """Whether the description says that no key is needed."""
    return operation.definition.raw.get("security") == []


def test_generated_requests(operations, fuzzed, capsys, long):
    # More than 5 s: enough requests to reach the usual refusals of each operation.
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    times = TIMES_AS_MANY if long else 1
    session = requests.Session()
    checks = [CHECKS.get_one(name) for name in CHECKED]
    statuses = Counter()

    def run(operation, mode, count):
        @seed(20261121)
        @settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=operation.as_strategy(mode),
            headers=st.sampled_from([AUTHORISED] * 9 + [STRANGER]),
            known_model=st.booleans(),
        )
        def each(case, headers, known_model):
            response = send(session, case, headers, known_model)
            statuses[response.status_code] += 1
            assert response.status_code != 500, response.text
            assert (response.status_code == 401) == (headers is STRANGER and not is_open(operation))
            case.validate_response(response, checks=checks)

        each()

    for operation in operations:
        count = CASES_WITH_BODY if operation.body else CASES_WITHOUT
        for mode in modes if operation.body else modes[:1]:
            run(operation, mode, count * times)
    session.close()
    with capsys.disabled():
        told = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
        print(f"\n{statuses.total()} generated requests to {len(operations)} operations: {told}")
    assert statuses.total() >= 160 * times
    assert {200, 400, 401, 404} <= set(statuses)
    _, health = fuzzed.health()
    assert health["status"] == "ready"
    assert all(engine["restarts"] == 0 for model in health["models"] for engine in model["engines"])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
def test_no_key_is_ever_ignored(operations, fuzzed, headers):
    for operation in operations:
        url = fuzzed.url + operation.path.replace("{id}", "smollm2")
        reply = requests.request(operation.method, url, headers=headers, json={}, timeout=10)
        assert (reply.status_code == 401) != is_open(operation), (operation.path, reply.status_code)
        if not is_open(operation):
            error = reply.json()["error"]
            assert "API keys" in (error if operation.path.startswith("/api/") else error["message"])
