"""A span per request, in the GenAI conventions' words, and no word of the request's own."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import LiveServer, live_server
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typer.testing import CliRunner

from phloem.runtime import Engine, InvalidRequest
from phloem.runtime.cli.main import app
from phloem.runtime.server.serve import COLLECTORS

PROMPT = "a-secret-prompt " * 5
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(engine: Engine, exporter: InMemorySpanExporter) -> Iterator[LiveServer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with live_server(engine, tracer_provider=provider) as server:
        yield server


@pytest.fixture
def server(traced: LiveServer, exporter: InMemorySpanExporter) -> Iterator[LiveServer]:
    exporter.clear()
    traced.engine.clear_cache()
    yield traced
    traced.wait_until_idle()


def spans(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """Wait for so many: a span ends a moment after its answer."""
    deadline = time.monotonic() + 10
    while len(exporter.get_finished_spans()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    found = list(exporter.get_finished_spans())
    assert len(found) == count
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_tokens_and_no_text(
    server: LiveServer, exporter: InMemorySpanExporter, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "n": 2, "ignore_eos": True, "stream": stream}
    with server.client() as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=body).status_code == 200
    cold, warm = spans(exporter, 2)
    assert (cold.name, cold.kind) == ("text_completion tiny", SpanKind.SERVER)
    num_tokens = len(PROMPT) + 1
    found = attributes(cold)
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phloem",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
    }
    assert attributes(warm)["gen_ai.usage.cache_read.input_tokens"] == num_tokens - 1
    assert "secret" not in "".join(span.to_json() for span in (cold, warm))


def test_a_traceparent_becomes_the_parent(server: LiveServer, exporter: InMemorySpanExporter) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with server.client() as client:
        client.post("/v1/chat/completions", json=body, headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"})
        client.post("/v1/chat/completions", json=body, headers={"traceparent": "00-nonsense"})
    child, orphan = spans(exporter, 2)
    assert child.context is not None
    assert child.parent is not None
    assert format(child.context.trace_id, "032x") == TRACE_ID
    assert format(child.parent.span_id, "016x") == SPAN_ID
    assert orphan.parent is None
    assert orphan.name == "chat tiny"


def test_requests_at_the_same_time_are_not_mixed_up(
    server: LiveServer, exporter: InMemorySpanExporter
) -> None:

    with server.client() as client, ThreadPoolExecutor(8) as threads:
        bodies = [
            {
                "model": "tiny",
                "prompt": "b" * size,
                "max_tokens": size,
                "ignore_eos": True,
                "stream": size % 2 == 0,
            }
            for size in range(1, 17)
        ]
        assert {
            each.status_code
            for each in threads.map(lambda body: client.post("/v1/completions", json=body), bodies)
        } == {200}
    found = [attributes(span) for span in spans(exporter, 16)]
    pairs = sorted((each["gen_ai.usage.input_tokens"], each["gen_ai.usage.output_tokens"]) for each in found)
    assert pairs == [(size + 1, size) for size in range(1, 17)]


def test_a_refusal_is_a_span_without_tokens_and_other_paths_are_none(
    server: LiveServer, exporter: InMemorySpanExporter
) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "n": 100_000})
        client.get("/v1/models")
        client.get("/health")
    [span] = spans(exporter, 1)
    found = attributes(span)
    assert (found["http.response.status_code"], found["error.type"]) == (400, "400")
    assert "gen_ai.usage.input_tokens" not in found
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in json.dumps(span.to_json())


def test_a_branch_is_traced_by_its_route_without_its_id(
    server: LiveServer, exporter: InMemorySpanExporter
) -> None:
    with server.client() as client:
        branch = client.post("/v1/branches", json={"text": "abc"}).json()["id"]
        assert client.post(f"/v1/branches/{branch}/generate", json={"max_tokens": 2}).status_code == 200
        client.delete(f"/v1/branches/{branch}")
    [span] = spans(exporter, 1)
    assert attributes(span)["http.route"] == "/v1/branches/{branch_id}/generate"
    assert branch not in span.to_json()


def test_traces_that_are_asked_for_and_not_installed_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv(COLLECTORS[0], "http://127.0.0.1:9/v1/traces")
    monkeypatch.setitem(sys.modules, "phloem.runtime.server.tracing", None)
    result = CliRunner().invoke(app, ["serve", "no-such-model"])
    assert isinstance(result.exception, InvalidRequest)
    assert "phloem[otel]" in str(result.exception)
