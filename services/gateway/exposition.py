"""`/metrics`: our names, and vLLM's beside them where the meaning is the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deepmesh import __version__
from deepmesh.wire.messages import ReplicaStats
from services.gateway.cache_metrics import cache_metrics
from services.gateway.device_metrics import device_metrics
from services.gateway.draft_metrics import draft_metrics
from services.gateway.expert_metrics import expert_metrics
from services.gateway.handover_metrics import handover_metrics
from services.gateway.metrics import Histogram, Metrics
from services.gateway.router_metrics import known_router, router_metrics
from services.gateway.step_metrics import step_metrics
from services.gateway.store_metrics import known_stores, store_metrics
from services.gateway.streams import Streams
from services.gateway.tokenizers import Tokenizers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ITL_NAMES = ("inter_token_latency", "time_per_output_token")  # the second of older dashboards
_POOLS = ("global", "window", "state")
_Read = Callable[[ReplicaStats], float]

# name without the prefix, what it is, how to read it, vLLM's name
_REPLICA_GAUGES: list[tuple[str, str, _Read, str]] = [
    ("requests_running", "Requests that hold blocks", lambda r: r.running, "num_requests_running"),
    ("requests_waiting", "Requests in the queue", lambda r: r.waiting, "num_requests_waiting"),
    ("waiting_tokens", "Prompt tokens not yet computed", lambda r: r.waiting_tokens, ""),
    ("inflight_tokens", "Tokens of steps not yet resolved", lambda r: r.inflight_tokens, ""),
    ("kv_usage", "Share of the fullest pool in use", lambda r: kv_usage(r), "kv_cache_usage_perc"),
    (
        "quarantined_blocks",
        "KV blocks of transfers over their deadline",
        lambda r: r.quarantined_blocks,
        "",
    ),
    ("replica_ready", "1 when the replica serves", lambda r: r.ready, ""),
    ("replica_paused", "1 while an operator holds it between two steps", lambda r: r.paused, ""),
    ("max_model_len", "Longest prompt and output together", lambda r: r.max_model_len, ""),
]
_REPLICA_COUNTERS: list[tuple[str, str, _Read, str]] = [
    ("preemptions", "Preempted requests", lambda r: r.preemptions, "num_preemptions"),
    ("prompt_tokens", "Prompt tokens", lambda r: r.prompt_tokens, "prompt_tokens"),
    ("output_tokens", "Output tokens", lambda r: r.output_tokens, "generation_tokens"),
    (
        "cached_prompt_tokens",
        "Prompt tokens served from the prefix cache",
        lambda r: r.cached_prompt_tokens,
        "prefix_cache_hits",
    ),
    (
        "store_hit_tokens",
        "Prompt tokens loaded from a kvstore",
        lambda r: r.store_hit_tokens,
        "external_prefix_cache_hits",
    ),
    ("stored_blocks", "Blocks and points written to a kvstore", lambda r: r.stored_blocks, ""),
    ("steps", "Group steps", lambda r: r.steps, ""),
    ("overrun_tokens", "Sampled and not wanted", lambda r: r.overrun_tokens, ""),
    ("null_rows", "Rows that sampled nothing though they should", lambda r: r.null_rows, ""),
    ("dummy_tokens", "Tokens of ranks without rows", lambda r: r.dummy_tokens, ""),
    ("pad_tokens", "Pads up to the widest rank of a step", lambda r: r.pad_tokens, ""),
    ("late_results", "Step results of an earlier engine epoch", lambda r: r.late_results, ""),
    (
        "verified_drafts",
        "Drafted tokens that steps verified",
        lambda r: sum(r.verified_drafts),
        "spec_decode_num_draft_tokens",
    ),
    (
        "accepted_drafts",
        "Drafted tokens that were right",
        lambda r: sum(r.accepted_drafts),
        "spec_decode_num_accepted_tokens",
    ),
    ("replica_finished", "Requests that ended well", lambda r: r.finished, ""),
    ("replica_failed", "Requests that failed", lambda r: r.failed, ""),
    ("failed_audits", "Invariants of the scheduler that failed", lambda r: r.failed_audits, ""),
]


def kv_usage(replica: ReplicaStats) -> float:
    """Share of the fullest pool that requests hold; cached blocks can be evicted: not in use."""
    pools = zip(replica.total_blocks, replica.free_blocks, replica.cached_blocks, strict=True)
    return max((max(0, t - f - c) / t for t, f, c in pools if t), default=0.0)


class Exposition(Collector):
    """Everything that one gateway can tell, made anew for each scrape."""

    def __init__(
        self, metrics: Metrics, streams: Streams, tokenizers: Tokenizers, model: str
    ) -> None:
        self._metrics = metrics
        self._streams = streams
        self._tokenizers = tokenizers
        self._model = model
        self.restarts: Mapping[str, int] = {}  # by process, as far as this gateway has seen
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        yield from self._gateway()
        yield from self._latencies()
        yield from self._replicas()

    def _gateway(self) -> Iterator[Metric]:
        metrics, streams = self._metrics, self._streams
        info = GaugeMetricFamily("deepmesh_build_info", "Version", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        requests = CounterMetricFamily(
            "deepmesh_requests", "Answered requests", labels=["protocol", "status"]
        )
        for (protocol, status), count in sorted(metrics.requests.items()):
            requests.add_metric([protocol, str(status)], count)
        yield requests
        running = GaugeMetricFamily("deepmesh_streams_running", "Open", labels=["protocol"])
        for protocol, count in sorted(metrics.running.items()):
            running.add_metric([protocol], count)
        yield running
        gone = CounterMetricFamily(
            "deepmesh_disconnects", "Clients that hung up before the end", labels=["protocol"]
        )
        for protocol, count in sorted(metrics.disconnects.items()):
            gone.add_metric([protocol], count)
        yield gone
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended well",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in sorted(metrics.finish_reasons.items()):
            success.add_metric([self._model, reason], count)
        yield success
        num_up = len(self._tokenizers.peers)
        yield GaugeMetricFamily("deepmesh_tokenizers_up", "Linked tokenizers", num_up)
        dropped = CounterMetricFamily(
            "deepmesh_dropped_spans", "Spans that no exporter took", labels=["process"]
        )
        for process, count in sorted(self._dropped_spans().items()):
            dropped.add_metric([process], count)
        yield dropped
        restarts = CounterMetricFamily(
            "deepmesh_process_restarts", "Starts after the first that was seen", labels=["process"]
        )
        for process, count in sorted(self.restarts.items()):
            restarts.add_metric([process], count)
        yield restarts
        yield CounterMetricFamily(
            "deepmesh_resubmissions", "Requests moved after a loss", streams.num_resubmitted
        )
        yield CounterMetricFamily(
            "deepmesh_stray_messages", "Messages of no open request", streams.num_stray_messages
        )

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, doc, by_protocol, theirs in (
            ("ttft", "Request in to first event out", metrics.first, ("time_to_first_token",)),
            ("itl", "Between events out", metrics.between, _ITL_NAMES),
            ("request", "Request in to last byte out", metrics.whole, ("e2e_request_latency",)),
        ):
            ours = HistogramMetricFamily(f"deepmesh_{name}_seconds", doc, labels=["protocol"])
            merged: Histogram | None = None
            for protocol, histogram in sorted(by_protocol.items()):
                ours.add_metric([protocol], histogram.buckets(), histogram.total)
                merged = merged or Histogram(histogram.bounds)
                merged.merge(histogram)
            yield ours
            for their_name in theirs:
                yield self._same(f"vllm:{their_name}_seconds", doc, merged)
        for name, doc, histogram in (
            ("prompt", "Prompt tokens of answered requests", metrics.prompts),
            ("generation", "Output tokens of answered requests", metrics.outputs),
        ):
            yield self._same(f"vllm:request_{name}_tokens", doc, histogram)

    def _same(self, name: str, doc: str, histogram: Histogram | None) -> Metric:
        """Under vLLM's name, of all protocols."""
        same = HistogramMetricFamily(name, doc, labels=["model_name"])
        if histogram is not None:
            same.add_metric([self._model], histogram.buckets(), histogram.total)
        return same

    def _replicas(self) -> Iterator[Metric]:
        replicas = self.known_replicas()
        for family, table in (
            (GaugeMetricFamily, _REPLICA_GAUGES),
            (CounterMetricFamily, _REPLICA_COUNTERS),
        ):
            for name, doc, read, theirs in table:
                ours = family(f"deepmesh_{name}", doc, labels=["replica"])
                for replica in replicas:
                    ours.add_metric([replica.name], read(replica))
                yield ours
                if theirs:
                    same = family(f"vllm:{theirs}", doc, labels=["model_name", "engine"])
                    for replica in replicas:
                        same.add_metric([self._model, replica.name], read(replica))
                    yield same
        queries = CounterMetricFamily(
            "vllm:prefix_cache_queries", "Prompt tokens looked up", labels=["model_name", "engine"]
        )
        usage = GaugeMetricFamily(
            "vllm:gpu_cache_usage_perc",
            "vllm:kv_cache_usage_perc under its older name",
            labels=["model_name", "engine"],
        )
        blocks = GaugeMetricFamily(
            "deepmesh_blocks", "KV blocks", labels=["replica", "pool", "state"]
        )
        for replica in replicas:
            queries.add_metric([self._model, replica.name], replica.prompt_tokens)
            usage.add_metric([self._model, replica.name], kv_usage(replica))
            for index, pool in enumerate(_POOLS):
                total, free = replica.total_blocks[index], replica.free_blocks[index]
                blocks.add_metric([replica.name, pool, "total"], total)
                blocks.add_metric([replica.name, pool, "free"], free)
                blocks.add_metric([replica.name, pool, "cached"], replica.cached_blocks[index])
                blocks.add_metric([replica.name, pool, "pinned"], replica.pinned_blocks[index])
        yield queries
        yield usage
        yield blocks
        yield from step_metrics(replicas, self._model)
        yield from device_metrics(replicas)
        yield from draft_metrics(replicas, self._model)
        yield from expert_metrics(replicas)
        yield from cache_metrics(replicas)
        yield from handover_metrics(replicas)
        told = [peer.stats for peer in self._tokenizers.peers]
        yield from store_metrics(known_stores(told))
        yield from router_metrics(known_router(told))

    def _dropped_spans(self) -> dict[str, int]:
        """By process, as of the last heartbeats."""
        peers = self._tokenizers.peers
        found = {link.peer: link.dropped_spans for peer in peers for link in peer.stats.links}
        return found | {peer.name: peer.stats.dropped_spans for peer in peers}

    def known_replicas(self) -> list[ReplicaStats]:
        """Each replica once. Every tokenizer reports all; more steps is the newer report."""
        newest: dict[str, ReplicaStats] = {}
        for peer in self._tokenizers.peers:
            for replica in peer.stats.replicas:
                known = newest.get(replica.name)
                if known is None or (replica.ready, replica.steps) > (known.ready, known.steps):
                    newest[replica.name] = replica
        return [newest[name] for name in sorted(newest)]
