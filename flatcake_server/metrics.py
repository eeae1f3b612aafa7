"""StoreStats for Prometheus: read when scraped, never kept twice.

Names are `flatcake_<noun>_<unit>`, counters `flatcake_<noun>_total`; labels are `pool`, `medium`, `reason` and `verb`. Each
field of the stats has one row in the tables below, so what `flatcake status` says and what is scraped cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from flatcake_server.stats import ClusterStats, StoreStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# (metric, field, what it is). Gauges of the node.
_NODE: Final = (
    ("flatcake_start_time_seconds", "started_s", "When the daemon started, seconds since 1970"),
    ("flatcake_uptime_seconds", "uptime_s", "Since the daemon started"),
    ("flatcake_ready_seconds", "ready_s", "From start to the first request that could be served"),
    ("flatcake_resident_memory_bytes", "rss_bytes", "Memory of the daemon's process, touched arena included"),
    ("flatcake_spaces", "spaces", "Spaces known"),
    ("flatcake_sessions", "sessions", "Sessions stored"),
    ("flatcake_segments", "segments", "Segments stored"),
    ("flatcake_clients", "clients", "Clients connected"),
    ("flatcake_leases", "leases", "Leases alive"),
    ("flatcake_pinned_sessions", "pinned_sessions", "Sessions that a lease protects"),
    ("flatcake_open_turns", "open_turns", "Turns being written"),
)

# Gauges of one pool. The four states add up to the quota.
_POOL: Final = (
    ("flatcake_pool_quota_bytes", "quota_bytes", "Hard limit"),
    ("flatcake_pool_committed_bytes", "committed_bytes", "Segments with their footers"),
    ("flatcake_pool_reserved_bytes", "reserved_bytes", "Turns under way and unused tails of session files"),
    ("flatcake_pool_releasing_bytes", "releasing_bytes", "Dropped, not free yet"),
    ("flatcake_pool_free_bytes", "free_bytes", "Free"),
    ("flatcake_pool_largest_free_bytes", "largest_free_bytes", "Largest contiguous free extent"),
    ("flatcake_pool_written_bytes", "written_bytes", "Data in the files that are there"),
    ("flatcake_pool_sessions", "sessions", "Sessions with bytes here"),
    ("flatcake_pool_segments", "segments", "Segments here"),
    ("flatcake_pool_blocks", "blocks", "Blocks here"),
    ("flatcake_pool_files", "files", "Session files here"),
    ("flatcake_pool_direct", "direct", "1: O_DIRECT works here"),
    ("flatcake_pool_full", "full", "1: its file system had no room for the last file, below the quota"),
    ("flatcake_pool_huge_pages", "huge_pages", "1: backed by huge pages"),
)

# Counters without a label.
_COUNTERS: Final = (
    ("flatcake_lookups", "lookups_total", "Lookups"),
    ("flatcake_lookup_blocks", "lookup_blocks_total", "Blocks asked for in lookups"),
    ("flatcake_turns_begun", "turns_begun_total", "Turns begun"),
    ("flatcake_turns_committed", "turns_committed_total", "Turns committed"),
    ("flatcake_turns_aborted", "turns_aborted_total", "Turns given up by their client or its death"),
    ("flatcake_turns_refused", "turns_refused_total", "Turns refused for lack of room"),
    ("flatcake_duplicate_blocks", "duplicate_blocks_total", "Blocks that somebody else had committed first"),
    ("flatcake_sessions_dropped", "sessions_dropped_total", "Sessions dropped by an operator"),
    ("flatcake_files_trimmed", "files_trimmed_total", "Files of idle sessions whose unused tail was given back"),
    ("flatcake_files_sealed", "files_sealed_total", "Session files closed for writing after a failed write"),
    ("flatcake_files_unopened", "files_unopened_total", "Files that could not be opened for a reader"),
    ("flatcake_corrupt_segments", "corrupt_segments_total", "Segments that differed from their checksums"),
    ("flatcake_disk_failures", "disk_failures_total", "SSD paths that went out of service"),
    ("flatcake_unforeseen", "unforeseen_total", "Errors that nobody foresaw, each with a traceback in the log"),
    ("flatcake_clients_lost", "clients_lost_total", "Connections that ended holding something"),
    ("flatcake_descriptors_handed", "descriptors_handed_total", "File descriptors handed to clients"),
)

# Of a node in a cluster, under `stats.cluster`.
_CLUSTER: Final = (
    ("flatcake_cluster_nodes", "nodes", "Nodes known and alive, this one included"),
    ("flatcake_cluster_links", "links", "Peers this node asks"),
    ("flatcake_cluster_attached", "attached", "Peers that ask this node"),
    ("flatcake_cluster_loans", "loans", "Leases of other nodes held for clients here"),
    ("flatcake_cluster_anchors", "anchors_published", "Anchors that the directory was told"),
    ("flatcake_cluster_anchors_pending", "anchors_pending", "Anchors that it is still to be told"),
    ("flatcake_cluster_copied_bytes", "copied_bytes", "Memory that copies of other nodes' prefixes have"),
    ("flatcake_cluster_staged", "staged", "Pieces of session files that lie ready for peers"),
)
_CLUSTER_COUNTERS: Final = (
    ("flatcake_anchors_published", "anchors_published_total", "Anchors told to the directory"),
    ("flatcake_anchors_withdrawn", "anchors_withdrawn_total", "Anchors withdrawn from the directory"),
    ("flatcake_anchors_missing", "anchors_missing_total", "Anchors that the directory had lost; told again"),
    ("flatcake_entries_swept", "entries_swept_total", "Entries of dead nodes taken out of the directory"),
    ("flatcake_remote_lookups", "remote_lookups_total", "Lookups that local blocks could not finish"),
    ("flatcake_remote_hits", "remote_hits_total", "Of these, other nodes held more"),
    ("flatcake_remote_misses", "remote_misses_total", "Of these, nobody held more"),
    ("flatcake_remote_failures", "remote_failures_total", "Of these, directory or peer did not answer in time"),
    ("flatcake_remote_blocks", "remote_blocks_total", "Blocks found at other nodes"),
    ("flatcake_stale_hints", "stale_hints_total", "The directory named a node that holds nothing of it"),
    ("flatcake_directory_failures", "directory_failures_total", "Times the directory did not answer"),
    ("flatcake_strangers", "strangers_total", "Peers turned away without the cluster's token"),
    ("flatcake_peer_lookups", "peer_lookups_total", "Lookups that other nodes asked of this one"),
    ("flatcake_copies_told", "copies_told_total", "Lookups told to keep a copy of what they restore from another node"),
    ("flatcake_copies_refused", "copies_refused_total", "Copies that found no room, or were being written already"),
    (
        "flatcake_doubts_told",
        "doubts_told_total",
        "Segments of other nodes whose bytes differed when they were read here",
    ),
    ("flatcake_doubts", "doubts_total", "Segments of this node that peers said so of"),
    ("flatcake_doubts_refuted", "doubts_refuted_total", "Of these, those that are sound here: the way damaged them"),
)
_CLUSTER_LABELLED: Final = (
    ("flatcake_peer_hit_blocks", "peer_hit_blocks_total", "medium", "Blocks found here for other nodes"),
    ("flatcake_directory_calls", "directory_calls_total", "verb", "Round trips to the directory"),
    ("flatcake_files_served", "files_served", "what", "Pieces of session files (and their bytes) read for peers"),
    ("flatcake_nvmeof_files", "nvmeof", "what", "Session files exported over NVMe-oF, and opened of other nodes"),
    ("flatcake_peer_calls", "peer_calls_total", "verb", "Round trips to peers"),
)

# Counters by one label; the key of the field's dict is its value. "medium/reason" makes two labels.
_LABELLED: Final = (
    ("flatcake_hit_blocks", "hit_blocks_total", ("medium",), "Blocks found by lookups"),
    ("flatcake_hit_bytes", "hit_bytes_total", ("medium",), "Bytes of the blocks found by lookups"),
    ("flatcake_stored_blocks", "stored_blocks_total", ("medium", "reason"), "Blocks committed"),
    ("flatcake_stored_bytes", "stored_bytes_total", ("medium",), "Bytes committed"),
    ("flatcake_sessions_reclaimed", "sessions_reclaimed_total", ("pool",), "Sessions dropped to make room"),
)


def families(stats: StoreStats) -> Iterator[Metric]:
    """All metrics of one moment."""
    info = GaugeMetricFamily(
        "flatcake_build_info", "Constant 1; the labels say what runs", labels=("version", "incarnation", "node_id")
    )
    info.add_metric((stats.version, stats.incarnation, str(stats.node_id)), 1)
    yield info
    for name, field, text in _NODE:
        yield GaugeMetricFamily(name, text, value=getattr(stats, field))
    yield GaugeMetricFamily("flatcake_index_blocks", "Blocks in the index", value=stats.index.blocks)
    yield GaugeMetricFamily("flatcake_index_bytes", "Memory of the index", value=stats.index.bytes)
    yield from _pool_families(stats)
    yield from _counter_families(stats)
    if stats.cluster is not None:
        yield from _cluster_families(stats.cluster)
    calls = SummaryMetricFamily("flatcake_rpc_seconds", "Calls served, and the time they took", labels=("verb",))
    for verb, (count, seconds) in stats.rpc_seconds.items():
        calls.add_metric((verb,), count_value=count, sum_value=seconds)
    yield calls


def _pool_families(stats: StoreStats) -> Iterator[Metric]:
    for name, field, text in _POOL:
        gauge = GaugeMetricFamily(name, text, labels=("pool", "medium"))
        for pool in stats.pools:
            gauge.add_metric((pool.name, pool.medium), float(getattr(pool, field)))
        yield gauge
    failed = GaugeMetricFamily("flatcake_pool_failed", "1: out of service", labels=("pool", "medium"))
    for pool in stats.pools:
        failed.add_metric((pool.name, pool.medium), 1.0 if pool.failure else 0.0)
    yield failed


def _counter_families(stats: StoreStats) -> Iterator[Metric]:
    for name, field, text in _COUNTERS:
        yield CounterMetricFamily(name, text, value=getattr(stats.counters, field))
    for name, field, labels, text in _LABELLED:
        counter = CounterMetricFamily(name, text, labels=labels)
        for key, value in getattr(stats.counters, field).items():
            # Only a placement has two labels; the path of a pool has slashes of its own.
            counter.add_metric(key.split("/", 1) if len(labels) > 1 else (key,), value)
        yield counter


def _cluster_families(cluster: ClusterStats) -> Iterator[Metric]:
    joined = GaugeMetricFamily(
        "flatcake_cluster_joined", "1: the state of its membership", labels=("state", "directory")
    )
    joined.add_metric((cluster.state, cluster.directory), 1.0)
    yield joined
    for name, field, text in _CLUSTER:
        yield GaugeMetricFamily(name, text, value=getattr(cluster, field))
    for name, field, text in _CLUSTER_COUNTERS:
        yield CounterMetricFamily(name, text, value=getattr(cluster, field))
    for name, field, label, text in _CLUSTER_LABELLED:
        counter = CounterMetricFamily(name, text, labels=(label,))
        for key, value in getattr(cluster, field).items():
            counter.add_metric((key,), value)
        yield counter


class StoreCollector(Collector):
    """Asks `stats` at each scrape. Runs where `stats` may be called: on the daemon's event loop."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # unchecked: registering asks for no sample before the store is there

    def collect(self) -> Iterator[Metric]:
        return families(self._stats())


def exposition(stats: Callable[[], StoreStats]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(stats))
    return generate_latest(registry)
