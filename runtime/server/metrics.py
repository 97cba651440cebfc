"""`/metrics` for Prometheus: vLLM's names where vLLM has them, so that its dashboards work, and phloem's own.

They are numbers of all tenants together, which is why they need the admin key where there are keys.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from phloem.radix import AgeHistogram
from phloem.runtime.outputs import Completion, EngineStats
from phloem.runtime.server.service import AdminDep, Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

router = APIRouter(tags=["operation"])


@router.get("/metrics")
async def metrics(request: Request, admin: AdminDep) -> Response:
    """Return all metrics in Prometheus' text format."""
    # In a thread, since the engine answers between two steps.
    text = await asyncio.to_thread(generate_latest, request.app.state.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def make_registry(service: Service) -> CollectorRegistry:
    """Return a registry of a server's metrics."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(service))
    first = _histogram(registry, "vllm:time_to_first_token_seconds", "Submission to first token.")
    whole = _histogram(registry, "vllm:e2e_request_latency_seconds", "Submission to last token.")
    each = _histogram(
        registry, "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a generation."
    )
    name = service.model_name

    def observe(completion: Completion, is_first: bool) -> None:
        whole.labels(name).observe(completion.total_s)
        if math.isnan(completion.first_token_s):
            return
        first.labels(name).observe(completion.first_token_s)
        if completion.usage.completion_tokens > 1:
            between_s = completion.total_s - completion.first_token_s
            each.labels(name).observe(between_s / (completion.usage.completion_tokens - 1))

    service.totals.listeners.append(observe)
    return registry


class _EngineCollector(Collector):
    """Reads the engine's counters and the server's when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Family]:
        """Yield every metric as it is now."""
        stats = self._service.engine.stats()
        yield from self._levels(stats)
        yield from self._counters(stats)
        yield self._hit_ages(stats.cache.hit_ages)

    def _levels(self, stats: EngineStats) -> Iterator[Family]:
        cache, service = stats.cache, self._service
        used = (cache.num_blocks - cache.free - cache.evictable) / cache.num_blocks
        yield self._gauge("vllm:num_requests_running", "Generations in the current step.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Generations that wait.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Blocks in use, of all; 1 is full.", used)
        blocks = GaugeMetricFamily(
            "phloem:blocks", "KV blocks; the pinned are among the locked.", labels=["model_name", "state"]
        )
        for state in ("free", "evictable", "locked", "pinned", "private"):
            blocks.add_metric([service.model_name, state], getattr(cache, state))
        yield blocks
        yield self._gauge("phloem:namespaces", "Namespaces with cached prefixes.", cache.namespaces)
        yield self._gauge("phloem:active_generations", "Whose answer is not out yet.", service.gate.active)
        yield self._gauge("phloem:branches", "Branches that clients hold.", len(service.branches))
        yield self._gauge("phloem:answer_memory_bytes", "Of remembered answers.", service.answers.num_bytes)

    def _counters(self, stats: EngineStats) -> Iterator[Family]:
        cache, totals = stats.cache, self._service.totals
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", totals.generated_tokens),
            ("vllm:num_preemptions", "Generations put back to wait.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up in the cache.", cache.query_tokens),
            ("vllm:prefix_cache_hits", "Of these, found.", cache.hit_tokens + cache.tail_tokens),
            ("phloem:cached_tokens", "Tokens of prompts that needed no computing.", totals.cached_tokens),
            ("phloem:failed_steps", "Steps that the model failed in.", stats.failed_steps),
            (
                "phloem:expired_branches",
                "Released since nobody used them.",
                self._service.branches.num_expired,
            ),
            ("phloem:expired_leases", "Pins that ended by themselves.", cache.expired_leases),
            ("phloem:refused_requests", "Answered with 429.", self._service.gate.refused),
        ):
            yield self._counter(name, text, value)
        yield self._counter_by(
            "vllm:request_success", "Generations that ended.", "finished_reason", totals.finished
        )
        lost = {"capacity": cache.evictions, "tail": stats.dropped_tails, "cleared": cache.cleared}
        text = "Blocks that left the cache: to make room, as the partly filled end of a path, or with all."
        yield self._counter_by("phloem:evictions", text, "reason", lost)
        yield self._counter_by(
            "phloem:missed_tokens", "Tokens of prompts that were computed.", "reason", totals.missed_tokens
        )

    def _hit_ages(self, ages: AgeHistogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "phloem:hit_age_seconds",
            "Since the last use of what a prompt hit; prompts that hit one whole block or more.",
            labels=["model_name"],
        )
        bounds = [*(str(float(bound)) for bound in ages.bounds_s), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(ages.counts), strict=True))
        family.add_metric([self._service.model_name], buckets, ages.sum_s)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._service.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._service.model_name], value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for each, value in sorted(values.items()):
            family.add_metric([self._service.model_name, each], value)
        return family


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, labelnames=["model_name"], buckets=SECONDS, registry=registry)
