"""What is counted, in Prometheus' text format: the gateway's own figures, and the queue's and engines' as told.

Figures of engines come from their heartbeats, so every gateway shows the same; add them up over engines, not over
gateways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagemill.ingest.overview import Overview

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ENGINE_GAUGES = {
    "weight_bytes": "bytes of the model's weights as the engine holds them",
    "num_blocks": "KV blocks of the engine",
    "free_blocks": "KV blocks that are free",
    "shared_blocks": "KV blocks that several sequences hold",
    "cached_blocks": "free KV blocks whose content can be used again",
    "waste_percent": "share of allocated KV slots without a token, mean over steps",
    "threads": "threads that compute, fewer than the setting beside a busy neighbour",
    "running": "requests that run",
    "waiting": "requests inside the engine that wait",
    "prefill_tokens_s": "measured prompt tokens a second",
    "decode_tokens_s": "measured generated tokens a second",
}


_ENGINE_COUNTS = {
    "preemptions": "preemptions since the engine began",
    "swap_preemptions": "of them, those whose blocks went to host memory",
    "recomputed_tokens": "tokens computed again after a preemption",
    "swapped_blocks": "KV blocks moved to host memory or back",
    "queried_tokens": "prompt tokens looked up in the prefix cache",
    "hit_tokens": "of them, those found",
    "output_tokens": "tokens generated since the engine began",
}


class GatewayMetrics:
    """The gateway's own counters."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "pagemill_http_requests", "HTTP requests answered", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "pagemill_http_request_seconds",
            "time to the end of an answer",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "pagemill_http_first_token_seconds",
            "time from a streaming request to its first text",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.open = Gauge("pagemill_http_open_requests", "HTTP requests being answered", registry=self._registry)
        self.disconnects = Counter(
            "pagemill_http_disconnects", "clients that left before the end of their answer", registry=self._registry
        )
        self.slow_readers = Counter(
            "pagemill_http_slow_readers", "clients cut since they read nothing", registry=self._registry
        )

    def render(self, overviews: Mapping[str, Overview]) -> bytes:
        """Everything as text; `overviews` by queue, those that could be read."""
        queues = CollectorRegistry(auto_describe=False)
        queues.register(_Shown(list(_families(overviews))))
        return generate_latest(self._registry) + generate_latest(queues)


class _Shown:
    """Metrics that were read a moment ago, as a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(overviews: Mapping[str, Overview]) -> Iterator[Metric]:
    outstanding = GaugeMetricFamily("pagemill_queue_outstanding", "unfinished requests", labels=("queue", "priority"))
    delayed = GaugeMetricFamily("pagemill_queue_delayed", "requests that wait for another attempt", labels=("queue",))
    letters = GaugeMetricFamily("pagemill_queue_dead_letters", "dead letters kept", labels=("queue",))
    due = GaugeMetricFamily("pagemill_queue_hooks_due", "webhooks in the outbox", labels=("queue",))
    given_up = GaugeMetricFamily("pagemill_queue_hooks_dead", "webhooks given up and kept", labels=("queue",))
    counted = CounterMetricFamily("pagemill_queue_events", "what the queue has counted", labels=("queue", "event"))
    age = GaugeMetricFamily(
        "pagemill_engine_heartbeat_age_seconds", "time since the engine's last heartbeat", labels=("queue", "engine")
    )
    models = GaugeMetricFamily(
        "pagemill_engine_model_info",
        "1 for the model that an engine has loaded, and the form of its weights",
        labels=("queue", "engine", "model", "dtype", "quantization"),
    )
    told = {
        name: family(f"pagemill_engine_{name}", text, labels=("queue", "engine"))
        for family, figures in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTS))
        for name, text in figures.items()
    }
    for queue, overview in overviews.items():
        for priority, count in enumerate(overview.outstanding):
            outstanding.add_metric((queue, str(priority)), count)
        delayed.add_metric((queue,), overview.delayed)
        letters.add_metric((queue,), overview.dead_letters)
        due.add_metric((queue,), overview.hooks_due)
        given_up.add_metric((queue,), overview.hooks_dead)
        for event, count in sorted(overview.counters.items()):
            counted.add_metric((queue, event), count)
        for engine in overview.engines:
            labels = (queue, engine.name)
            age.add_metric(labels, engine.age_s)
            texts = [str(engine.description.get(name, "")) for name in ("model", "dtype", "quantization")]
            models.add_metric((*labels, *texts), 1)
            for name, family in told.items():
                if isinstance(value := engine.description.get(name), int | float):
                    family.add_metric(labels, value)
    yield from (outstanding, delayed, letters, due, given_up, counted, age, models, *told.values())
