"""Schemathesis drives every operation that `/openapi.json` names: whether a request fits its schema or not, no answer is a 5xx."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, delete_all, ids_at, live_server
from schemathesis import APIOperation, Case, GenerationMode

from phloem.runtime import Engine

LISTS = {"branch_id": "/v1/branches", "pin_id": "/v1/cache/pins"}


@pytest.fixture(scope="module")
def small_server(tiny_path: Path) -> Iterator[LiveServer]:
    # Paths are short, so that what sets no limit ends soon.
    with (
        Engine(tiny_path, dtype="float32", num_blocks=128, max_model_len=256) as engine,
        live_server(engine, max_n=3, max_branches_per_key=64, max_pinned_tokens_per_key=512) as server,
    ):
        yield server
        engine.clear_cache()  # and with it the leases of Anthropic's breakpoints
        server.wait_until_idle()


@pytest.mark.parametrize("num_examples", [3, pytest.param(500, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(
    small_server: LiveServer, num_examples: int, subtests: pytest.Subtests
) -> None:
    schema = schemathesis.openapi.from_url(f"{small_server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    served: Counter[str] = Counter()
    with small_server.client() as client:
        for operation in operations:
            with subtests.test(operation.label):
                served[operation.label] = num_served(operation, client, num_examples)
            delete_all(client)
    assert len(operations) >= 36
    if num_examples >= 500:
        # A server that refuses everything does not fail either.
        assert not [label for label, count in served.items() if count == 0]


def num_served(operation: APIOperation, client: httpx.Client, num_examples: int) -> int:
    """Send requests that fit the operation's schema, and ones that do not; return to how many the answer was 200."""
    served = 0
    cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @settings(
        max_examples=num_examples, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(cases, st.booleans(), st.randoms())
    def send(case: Case, is_likely: bool, choice: Random) -> None:
        nonlocal served
        if is_likely:
            name_what_there_is(case, client)
            keep_it_small(case, choice)
        answer = case.call(base_url=str(client.base_url), session=session, timeout=30)
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.text}"
        served += answer.status_code == 200

    with requests.Session() as session:
        send()
    return served


def name_what_there_is(case: Case, client: httpx.Client) -> None:
    """Put the model's name, and ids that exist, in the place of random ones."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"
    for name in case.path_parameters or {}:
        case.path_parameters[name] = existing(name, client)


def keep_it_small(case: Case, choice: Random) -> None:
    """Keep little of a body besides what it is about: of many fields, one is nearly always beyond a limit that no schema tells."""
    if not isinstance(case.body, dict):
        return
    asked = [name for name in ("text", "token_ids", "messages") if case.body.get(name)]
    kept = {"model", "prompt", "input", "continuations", "n", "max_tokens", *asked[:1]}
    case.body = {name: value for name, value in case.body.items() if name in kept or choice.random() < 0.05}
    for name in ("n", "max_tokens"):
        if isinstance(case.body.get(name), int):
            case.body[name] = choice.randint(1, 3)


def existing(name: str, client: httpx.Client) -> str:
    if name == "response_id":
        body = {"model": "tiny", "input": "a", "max_output_tokens": 1}
        return str(client.post("/v1/responses", json=body).json()["id"])
    if name in LISTS:
        ids = ids_at(client, LISTS[name])
        return ids[-1] if ids else str(client.post(LISTS[name], json={"text": "a" * 20}).json()["id"])
    return "tiny"
