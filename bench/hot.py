"""What a copy of a hot prefix brings: restores of another node's prefix before it is copied, while, and after. Loopback.

Two daemons and a real redis-server; `copy_after_hits` is 3. For each of --prefixes prefixes, which node 2 holds in memory, node 1's client looks
it up and restores it six times: twice from there (`remote`), once more with the copy written at its end (`copying`), then
from its own memory (`local`). All times are of lookup and restore together, what an engine waits for; `memcpy` is one of the
same bytes. Medians are compared (`memcpy`: bests). Needs redis-server or valkey-server, and UCX. Run: python bench/hot.py [--mib 128]
"""

from __future__ import annotations

import contextlib
import statistics
from functools import partial

import numpy as np
from _session import BLOCK_BYTES, Pages, open_space, restore, same, session_keys, write_session
from _support import MIB, Report, arguments, say, timed_s
from remote import settled, two_nodes

import flatcake_client as fc
from flatcake_transport.window import aligned_buffer

AFTER_HITS = 3
LOCAL = 3


def main() -> None:
    args = arguments(__doc__, mib=(128, "of each prefix"), prefixes=(6, "copied one after the other"))
    blocks = args.mib * MIB // BLOCK_BYTES
    report = Report(f"a hot prefix of {args.mib} MiB, copied after {AFTER_HITS} remote hits, loopback")
    memory_bytes = 2 * args.prefixes * blocks * BLOCK_BYTES
    remote_s, copying_s, local_s, memcpy_s = [], [], [], []
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(two_nodes(memory_bytes, copy_after_hits=AFTER_HITS, copy_memory_share=0.75))
        here, there = (stack.enter_context(fc.connect(node.endpoint, timeout_s=10)) for node in nodes)
        near, far = open_space(here), open_space(there)
        written, pages = Pages(blocks), Pages(blocks, seed=1)
        source, target = aligned_buffer(pages.size_bytes), aligned_buffer(pages.size_bytes)
        source[:], target[:] = 1, 2
        for seed in range(args.prefixes):
            say(f"prefix {seed + 1} of {args.prefixes}")
            written.fill(seed)
            keys = session_keys(far, seed, blocks)
            write_session(far, keys, f"s{seed}", written, [blocks], share_counts=[2] * blocks)
            settled(nodes)
            times = []
            for _ in range(AFTER_HITS + LOCAL):
                pages.clear()
                times.append(timed_s(partial(restore, near, keys, pages)))
                assert same(written, pages), "other bytes came back"
                memcpy_s.append(timed_s(partial(np.copyto, target, source)))
            assert here.stats().copied_blocks == (seed + 1) * blocks, "it was not copied, or not then"
            remote_s += times[: AFTER_HITS - 1]
            copying_s.append(times[AFTER_HITS - 1])
            local_s += times[AFTER_HITS:]
    for name, times in (("remote", remote_s), ("copying", copying_s), ("local", local_s), ("memcpy", memcpy_s)):
        best, median = min(times) * 1e3, statistics.median(times) * 1e3
        report.add(f"{name}, ms", median, detail=f"best {best:.1f}, {pages.size_bytes / min(times) / 1e9:.2f} GB/s")
    remote, copying, local = (statistics.median(times) for times in (remote_s, copying_s, local_s))
    report.add("remote / local", remote / local, detail="time to the last layer, medians")
    report.add("copying / remote", copying / remote, detail="what the one that copies waits")
    report.add("memcpy / local", min(memcpy_s) / min(local_s), detail="of the limit, bests")
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
