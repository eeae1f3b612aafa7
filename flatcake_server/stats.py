"""What the daemon says of itself: frozen values whose counts add up. Prometheus, `flatcake status`, the page and tests read them.

Names of counters end in `_total` and never fall while the daemon lives; everything else is the state of this moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One place that holds blocks: the arena, or one SSD path. `free + reserved + committed + releasing == quota`."""

    name: str  # "memory" or the SSD path
    medium: str
    quota_bytes: int
    committed_bytes: int  # segments with their footers; on SSD with what else their files hold
    reserved_bytes: int  # of turns under way and tails of pre-allocated files
    releasing_bytes: int  # unpublished, not free yet: being deleted, or could not be deleted
    free_bytes: int
    largest_free_bytes: int
    sessions: int
    segments: int
    blocks: int
    files: int = 0
    written_bytes: int = 0  # data committed in the files that are there; reserved / written is the price of headroom
    direct: bool = False  # O_DIRECT works here
    full: bool = False  # its file system had no room for the last file, below the quota
    huge_pages: bool = False
    failure: str = ""  # not empty: this path is out of service, and why


@dataclass(frozen=True, slots=True)
class Counters:
    lookups_total: int = 0
    lookup_blocks_total: int = 0
    hit_blocks_total: dict[str, int] = field(default_factory=dict)  # by medium
    hit_bytes_total: dict[str, int] = field(default_factory=dict)  # by medium
    turns_begun_total: int = 0
    turns_committed_total: int = 0
    turns_aborted_total: int = 0
    turns_refused_total: int = 0
    stored_blocks_total: dict[str, int] = field(default_factory=dict)  # by "medium/reason" of the placement
    stored_bytes_total: dict[str, int] = field(default_factory=dict)  # by medium
    duplicate_blocks_total: int = 0
    sessions_reclaimed_total: dict[str, int] = field(default_factory=dict)  # by pool name
    sessions_dropped_total: int = 0  # by an operator's word
    files_trimmed_total: int = 0
    files_sealed_total: int = 0
    files_unopened_total: int = 0  # left out of what readers were handed
    corrupt_segments_total: int = 0
    disk_failures_total: int = 0
    unforeseen_total: int = 0  # errors behind everybody's back that nobody foresaw; the log has them
    clients_lost_total: int = 0  # connections that ended holding something
    descriptors_handed_total: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    blocks: int
    bytes: int
    bytes_per_block: float


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of the cluster, as this one knows it."""

    node: int
    state: str  # of the node itself its membership; of others, that they are joined
    link: str  # "this node"; "linked", "known" (asked when needed) or "silent" (left alone after a failure)
    address: str
    version: str
    incarnation: str
    found_blocks: int = 0  # found there for engines of this node
    copied_bytes: int = 0  # of this node's memory: copies of what others hold


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """A node among others. `remote_lookups == remote_hits + remote_misses + remote_failures`."""

    directory: str
    state: str  # of its membership: outside, joined, cut off, refused, left
    refusal: str  # why it is refused, or nothing
    nodes: int  # known and alive, this one included
    links: int  # to peers we ask
    attached: int  # peers that ask us
    loans: int  # leases of other nodes held for our clients
    anchors_published: int
    anchors_pending: int
    anchors_published_total: int  # those told again included
    anchors_withdrawn_total: int
    anchors_missing_total: int  # told once, and not found when they were looked for: told again
    entries_swept_total: int  # of dead nodes, taken out of the directory
    remote_lookups_total: int  # that local blocks could not finish
    remote_hits_total: int
    remote_misses_total: int  # nobody holds more, or the entry was stale
    remote_failures_total: int  # directory or peer did not answer in time
    remote_blocks_total: int  # found at other nodes
    stale_hints_total: int  # the directory named a node that holds nothing of it
    directory_failures_total: int
    strangers_total: int  # turned away without the cluster's token
    peer_lookups_total: int  # that others asked of us
    peer_hit_blocks_total: dict[str, int]  # by medium
    directory_calls_total: dict[str, int]  # round trips by verb
    peer_calls_total: dict[str, int]  # round trips by verb
    members: tuple[NodeRow, ...]  # this node first
    files_served: dict[str, int] = field(
        default_factory=dict
    )  # stagings of file ranges for peers, by what became of them
    nvmeof: dict[str, int] = field(
        default_factory=dict
    )  # files exported for peers and opened of theirs, by what became of them
    nvmeof_failure: str = ""  # why files are not exported, or were not opened the last time
    staged: int = 0  # stagings that peers have now
    doubts_told_total: int = 0  # segments of others whose bytes differed when they were read here
    doubts_total: int = 0  # segments of ours that peers said so of, and that were looked at
    doubts_refuted_total: int = 0  # of these, nothing was wrong with them here
    copies_told_total: int = 0  # lookups that were told to keep what they restore: hot here, and held elsewhere
    copies_refused_total: int = 0  # such copies that found no room, or were being written already
    copied_bytes: int = 0  # that copies have in memory now


@dataclass(frozen=True, slots=True)
class StoreStats:
    version: str
    incarnation: str
    node_id: int
    started_s: float  # wall clock
    uptime_s: float
    ready_s: float  # from start to the first request served
    rss_bytes: int
    spaces: int
    sessions: int
    segments: int
    clients: int
    leases: int
    pinned_sessions: int
    open_turns: int
    index: IndexStats
    pools: tuple[PoolStats, ...]
    counters: Counters
    rpc_seconds: dict[str, tuple[int, float]] = field(default_factory=dict)  # verb -> (count, seconds in all)
    cluster: ClusterStats | None = None  # None: a node by itself
