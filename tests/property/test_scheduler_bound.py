"""Nobody starves: the core, driven into saturation, keeps every wait below the bound its header proves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatcake_client.scheduler import BYTES_PER_GB, TwoQueues

BANDWIDTH = 1.0  # GB/s
BURST = 4.0  # GB that may arrive at once
SIZES = [0.25, 0.5, 1.0, 2.0]  # GB


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0, 2)), min_size=1, max_size=60), st.integers(0, 12))
def test_waits_are_bounded_at_full_saturation(requests, backlog):
    """Arrivals as dense as a bucket of BURST filled at the disk's own rate allows; one device, one prefetch at a time."""
    queues: TwoQueues[int] = TwoQueues(prefetches_max=1)
    arrivals = [(0.0, SIZES[n % len(SIZES)]) for n in range(backlog)]
    tokens, at = BURST, 0.0
    for size, pause in requests:
        later = at + pause
        tokens = min(BURST, tokens + (later - at) * BANDWIDTH)
        if tokens < size:
            later += (size - tokens) / BANDWIDTH
            tokens = size
        tokens -= size
        at = later
        arrivals.append((at, size))
    check_waits(queues, arrivals)


def test_a_large_request_gets_its_turn_in_an_endless_stream_of_small_ones():
    small = min(SIZES)
    arrivals = [(0.0, small), (0.0, max(SIZES)), *((n * small / BANDWIDTH, small) for n in range(1, 1000))]
    check_waits(TwoQueues(prefetches_max=1), arrivals)


def check_waits(queues: TwoQueues[int], arrivals: list[tuple[float, float]]) -> None:
    backlog_gb = sum(size for when, size in arrivals if when == 0.0)
    began = serve(queues, arrivals)
    for n, (when, size) in enumerate(arrivals):
        there_gb = backlog_gb + BURST + max(SIZES)  # at most, at any moment: the load is never above the disk's rate
        bound_s = (there_gb + BURST) / BANDWIDTH * size / min(SIZES)
        assert began[n] - when <= bound_s, f"request {n} of {size} GB waited {began[n] - when} s, more than {bound_s}"


def serve(queues: TwoQueues[int], arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """When each request's prefetch began."""
    now, nth, began = 0.0, 0, {}
    while len(began) < len(arrivals):
        while nth < len(arrivals) and arrivals[nth][0] <= now:
            queues.arrive(nth, arrivals[nth][0], int(arrivals[nth][1] * BYTES_PER_GB))
            nth += 1
        started = queues.start_prefetches(now)
        if not started:
            now = arrivals[nth][0]
            continue
        (request,) = started
        began[request] = now
        now += arrivals[request][1] / BANDWIDTH
        queues.prefetched(request)
    return began


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=2, max_size=20), st.integers(6, 20))
def test_who_is_chosen_waited_longest_for_its_size(requests, now):
    queues: TwoQueues[int] = TwoQueues(prefetches_max=1)
    for n, (arrival, size) in enumerate(requests):
        queues.arrive(n, arrival, size * BYTES_PER_GB)
    left = dict(enumerate(requests))
    while left:
        (chosen,) = queues.start_prefetches(now)
        arrival, size = left.pop(chosen)
        assert all((now - arrival) / size >= (now - other) / s for other, s in left.values())
        queues.prefetched(chosen)
    order = [queues.take_ready() for _ in requests]
    assert order == sorted(range(len(requests)), key=lambda n: (requests[n][0], n))
