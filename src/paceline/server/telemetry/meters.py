"""Meters: what a server has done and does, as Prometheus reads it.

Names end in their unit, and times are of requests that ended by themselves; what the engine does
now is asked of it for each page.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from paceline.engine.answers.outputs import RequestMetrics
from paceline.server.border.messages import STEP_SECONDS, Looked, Steps

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Meters:
    """Owns the counts of one server; of its loop."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def count(name: str, text: str) -> Counter:
            return Counter(f"paceline_{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"paceline_{name}", text, registry=registry)

        def times(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"paceline_{name}", text, buckets=buckets, registry=registry)

        self._first = times("time_to_first_token_seconds", "From arrival to the first token.")
        self._each = times(
            "time_per_output_token_seconds", "Between tokens, mean of a request.", _TOKEN_SECONDS
        )
        self._whole = times("e2e_request_latency_seconds", "From arrival to the last token.")
        self._prompt = count("prompt_tokens", "Of prompts that were answered.")
        self._output = count("generation_tokens", "Generated.")
        self._preempted = count("preemptions", "Requests that had to give up their row.")
        self._drafted = count("draft_tokens", "Drafts that were verified.")
        self._accepted = count("accepted_draft_tokens", "Drafts that were accepted.")
        self._forced = count("forced_draft_tokens", "Of these, those that a grammar forced.")
        self._queried = count("prefix_cache_queried_tokens", "Looked for in the prefix cache.")
        self._hits = count("prefix_cache_hit_tokens", "Found there.")
        self._running = gauge("requests_running", "Completions with a row.")
        self._waiting = gauge("requests_waiting", "Completions that wait for one.")
        self._kv = gauge("kv_cache_usage_ratio", "Pages of running requests in the fullest group.")
        self._pages = Gauge(
            "paceline_cache_pages",
            "Of a cache group: used by requests, cached for prefixes, free.",
            ["group", "state"],
            registry=registry,
        )
        self._up = gauge("engine_up", "1 when it answered in time; else gauges are old.")
        self._seen = (0, 0)  # queried and hit tokens that are counted
        self._steps = StepMeter()
        registry.register(self._steps)

    def finished(self, request: RequestMetrics) -> None:
        """A request has ended by itself."""
        for histogram, seconds in ((self._first, request.ttft_s), (self._whole, request.latency_s)):
            if seconds is not None:
                histogram.observe(seconds)
        if request.decode_tok_s:
            self._each.observe(1.0 / request.decode_tok_s)
        self._prompt.inc(request.prompt_tokens)
        self._output.inc(request.output_tokens)
        self._preempted.inc(request.preemptions)
        self._drafted.inc(request.drafted_tokens)
        self._accepted.inc(sum(request.accepted_by_position))
        self._forced.inc(request.forced_tokens)

    def page(self, look: Looked | None) -> bytes:
        """What Prometheus reads.  look: None where the engine does not answer."""
        self._up.set(look is not None)
        if look is not None:
            self._running.set(look.running)
            self._waiting.set(look.waiting)
            self._kv.set(look.kv_used)
            for group, pages in look.pages.items():
                for state, count in asdict(pages).items():
                    self._pages.labels(group, state).set(count)
            queried, hits = self._seen
            self._queried.inc(look.queried_tokens - queried)
            self._hits.inc(look.hit_tokens - hits)
            self._seen = look.queried_tokens, look.hit_tokens
            self._steps.seen = look.steps
        return generate_latest(self._registry)


class StepMeter(Collector):
    """Shows what the engine has counted of its steps."""

    def __init__(self) -> None:
        self.seen: Mapping[str, Steps] = {}  # by kind, when it was last asked

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        text = "Of the turn that brought a step's outputs, by its kind."
        family = HistogramMetricFamily("paceline_step_seconds", text, labels=["kind"])
        bounds = [*map(str, STEP_SECONDS), "+Inf"]
        for kind, steps in self.seen.items():
            buckets = [*zip(bounds, accumulate(steps.counts), strict=True)]
            family.add_metric([kind], buckets, steps.seconds)
        yield family
