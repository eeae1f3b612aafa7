"""Request traces: what arrived when, how long it was, and which blocks its prompt had. Pure but for the file it reads.

Three formats are read, told apart by what stands in the file, gzip or plain:

    flatcake-trace/1   one JSON object a line: t, session, turn, input_tokens, output_tokens, block_tokens, hash_delta.
                       hash_delta = [keep, start, length, start, length ...]: the first `keep` ids of the session's
                       previous request, then runs of consecutive ids
    mooncake           one JSON object a line: timestamp (ms), input_length, output_length, hash_ids of 512 tokens;
                       sessions are inferred (chains.SessionGuess)
    kv-cache-tester    one JSON object a session: id, block_size, hash_id_scope, requests[] of t, in, out, hash_ids, and
                       of type "subagent" with requests of their own. One file, several in one (a line each), or a
                       directory of them

Requests come in order of arrival, one at a time: a trace of 83 million ids needs no more memory than its open sessions.
kv-cache-tester's times start at 0 in each session, so its sessions are spread evenly over `spread_s` (by the golden ratio:
without chance, the same each time). What is wrong is a ValueError that names the file and the line.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import numpy as np

from flatcake_transport.chains import ChainNumbers, Ids, SessionGuess

__all__ = [
    "COMPACT",
    "KV_CACHE_TESTER",
    "MOONCAKE",
    "Ids",
    "Request",
    "join_sessions",
    "read_trace",
    "trace_format",
    "write_trace",
]

COMPACT: Final = "flatcake-trace/1"
MOONCAKE: Final = "mooncake"
KV_CACHE_TESTER: Final = "kv-cache-tester"

MOONCAKE_BLOCK_TOKENS: Final = 512
DAY_S: Final = 86_400.0
_GOLDEN: Final = 0.618_033_988_749_895  # fractions of its multiples fill an interval evenly, however many are taken
_STEP_LINES: Final = 64  # progress is said so often
_IDS_MAX: Final = 1 << 26  # of one prompt: 67 million blocks are more than any engine takes, and half a GiB here

Progress = Callable[[int, int], None]  # bytes of the file(s) read, and of all


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request. `turn` counts from 1 within `session`; times never decrease within a trace.

    `ids` are of the prompt's blocks from the first, (n,) int64: equal ids after equal ids mean the same block. The last one
    may be partial (Mooncake) or left out (the others). Belongs to the reader of the trace; do not write to it.
    """

    arrival_s: float
    session: str
    turn: int
    input_tokens: int
    output_tokens: int
    block_tokens: int
    ids: Ids


def read_trace(path: Path, *, spread_s: float = DAY_S, progress: Progress | None = None) -> Iterator[Request]:
    """Requests of a trace in order of arrival.

    Args:
        path: a file of any format, or a directory of kv-cache-tester's files.
        spread_s: over which sessions start, where the format has no starts (kv-cache-tester).
        progress: told now and then how far the reading is.

    Raises:
        ValueError: not a trace, broken, or without block ids; the message starts with file and line.
        OSError: the file cannot be read.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ValueError(
            f"{path}: no *.json in this directory: give a trace, or a directory of kv-cache-tester's files"
        )
    kind = trace_format(files[0])
    if kind == KV_CACHE_TESTER:
        yield from join_sessions(_read_sessions(files, spread_s, progress))
    elif path.is_dir():
        raise _wrong(files[0], f"is a trace of its own ({kind}): give the file instead of its directory")
    else:
        reader = _read_compact if kind == COMPACT else _read_mooncake
        yield from _in_order(reader(path, progress), path)


def trace_format(path: Path) -> str:
    """COMPACT, MOONCAKE or KV_CACHE_TESTER, by what the file says. Raises: ValueError: none of them."""
    for where, line in _lines(path, None):
        try:
            fields = json.loads(line)
        except ValueError:
            # A session's file may be written over many lines; nothing else may.
            fields = _document(path, where) if line.lstrip()[:1] == b"{" else None
        if isinstance(fields, dict):
            if isinstance(fields.get("requests"), list):
                return KV_CACHE_TESTER
            if "hash_ids" in fields and "timestamp" in fields:
                return MOONCAKE
            if "hash_delta" in fields:
                return COMPACT
            if {"t", "session", "input_tokens"} <= fields.keys() or {"timestamp", "input_length"} <= fields.keys():
                raise _wrong(where, "has lengths but no block ids: nothing can be said about reuse")
        break
    raise ValueError(f"{path}:1: no trace: expected {COMPACT}, Mooncake's JSONL, or a session of kv-cache-tester")


def write_trace(path: Path, requests: Iterable[Request]) -> int:
    """Write requests in the compact format, gzip. Returns how many. They must come in order of arrival."""
    previous: dict[str, Ids] = {}
    count = 0
    with gzip.open(path, "wt", compresslevel=6, encoding="utf-8") as file:
        for request in requests:
            before = previous.get(request.session, request.ids[:0])
            previous[request.session] = request.ids
            line = {
                "t": round(request.arrival_s, 3),
                "session": request.session,
                "turn": request.turn,
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
                "block_tokens": request.block_tokens,
                "hash_delta": _delta(before, request.ids),
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += 1
    return count


def join_sessions(sessions: Iterable[tuple[float, Iterable[Request]]]) -> Iterator[Request]:
    """Requests of many sessions in order of arrival; a session is asked for its first when its start has come.

    Args:
        sessions: (start in seconds, requests), by start; requests by arrival, none before the start.
    """
    ahead: list[tuple[float, int, Request, Iterator[Request]]] = []
    for n, (start_s, requests) in enumerate(sessions):
        while ahead and ahead[0][0] <= start_s:
            yield _next_of(ahead)
        rest = iter(requests)
        first = next(rest, None)
        if first is not None:
            heapq.heappush(ahead, (first.arrival_s, n, first, rest))
    while ahead:
        yield _next_of(ahead)


def _next_of(ahead: list[tuple[float, int, Request, Iterator[Request]]]) -> Request:
    _, n, request, rest = ahead[0]
    following = next(rest, None)
    if following is None:
        heapq.heappop(ahead)
    else:
        heapq.heapreplace(ahead, (following.arrival_s, n, following, rest))
    return request


# -- the compact format ------------------------------------------------------------------------------------------------


def _delta(before: Ids, ids: Ids) -> list[int]:
    both = min(len(before), len(ids))
    differ = np.flatnonzero(before[:both] != ids[:both])
    keep = int(differ[0]) if len(differ) else both
    rest = ids[keep:]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(rest) != 1) + 1)) if len(rest) else np.empty(0, np.int64)
    runs = np.stack([rest[starts], np.diff(np.append(starts, len(rest)))], axis=1)
    return [keep, *runs.reshape(-1).tolist()]


def _read_compact(path: Path, progress: Progress | None) -> Iterator[Request]:
    previous: dict[str, Ids] = {}
    nothing = np.empty(0, np.int64)
    for where, line in _lines(path, progress):
        fields = _object(line, where)
        session, delta = _text(fields, "session", where), fields.get("hash_delta")
        if not isinstance(delta, list):
            raise _wrong(where, "no hash_delta: without block ids nothing can be said about reuse")
        numbers = _integers(delta, "hash_delta", where)
        before = previous.get(session, nothing)
        if len(numbers) % 2 == 0 or numbers[0] < 0 or (numbers[2::2] < 1).any():
            raise _wrong(where, f"hash_delta is keep, then pairs of start and length: not {delta[:9]}")
        if sum(numbers[2::2].tolist()) > _IDS_MAX:
            raise _wrong(where, f"hash_delta has more than {_IDS_MAX} blocks: not {delta[:9]}")
        if numbers[0] > len(before):
            raise _wrong(where, f"keeps {numbers[0]} ids of {session}, whose previous request has {len(before)}")
        runs = [np.arange(start, start + length) for start, length in numbers[1:].reshape(-1, 2).tolist()]
        ids = previous[session] = np.concatenate([before[: numbers[0]], *runs])
        yield _checked(
            where,
            arrival_s=_number(fields, "t", where),
            session=session,
            turn=_count(fields, "turn", where),
            input_tokens=_count(fields, "input_tokens", where),
            output_tokens=_count(fields, "output_tokens", where),
            block_tokens=_count(fields, "block_tokens", where),
            ids=ids,
        )


# -- Mooncake ----------------------------------------------------------------------------------------------------------


def _read_mooncake(path: Path, progress: Progress | None) -> Iterator[Request]:
    guess, chains = SessionGuess(), ChainNumbers()
    for where, line in _lines(path, None):
        guess.see(*chains.number(_integers(_object(line, where).get("hash_ids"), "hash_ids", where)))
    chains = ChainNumbers()
    for where, line in _lines(path, progress):
        fields = _object(line, where)
        ids = _integers(fields.get("hash_ids"), "hash_ids", where)
        input_tokens = _count(fields, "input_length", where)
        session, turn = guess.place(chains.number(ids)[0], input_tokens // MOONCAKE_BLOCK_TOKENS)
        yield _checked(
            where,
            arrival_s=_number(fields, "timestamp", where) / 1000,
            session=f"inferred-{session + 1}",
            turn=turn,
            input_tokens=input_tokens,
            output_tokens=_count(fields, "output_length", where),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
            ids=ids,
        )


# -- kv-cache-tester ---------------------------------------------------------------------------------------------------


def _read_sessions(
    files: list[Path], spread_s: float, progress: Progress | None
) -> Iterator[tuple[float, list[Request]]]:
    """Sessions by start. A file is opened when its session starts, so only open sessions are in memory."""
    starts = sorted((i * _GOLDEN % 1.0 * spread_s, i) for i in range(len(files)))
    scope, next_id, done = "", 0, 0
    total = sum(file.stat().st_size for file in files)
    for start_s, i in starts:
        for document, where in _documents(files[i]):
            told = str(document.get("hash_id_scope") or "local")
            if scope not in ("", told):
                raise _wrong(where, f"hash_id_scope is {told!r}, before it {scope!r}: their ids would collide")
            scope = told
            requests, ids_max = _session_requests(document, where, start_s, next_id if scope == "local" else 0)
            next_id = max(next_id, ids_max + 1)
            yield start_s, requests
        done += files[i].stat().st_size
        if progress:
            progress(done, total)


def _session_requests(document: dict[str, Any], where: str, start_s: float, first_id: int) -> tuple[list[Request], int]:
    """Requests of one session and its subagents by arrival, and the largest id among them."""
    name = str(document.get("id") or Path(where.rsplit(":", 1)[0]).stem)
    block_tokens = _count(document, "block_size", where)
    found: list[Request] = []
    stack = [(name, start_s, document["requests"])]
    while stack:
        session, at_s, entries = stack.pop()
        turns = []
        for n, fields in enumerate(entries):
            here = f"{where} ({session}, request {n + 1})"
            if not isinstance(fields, dict):
                raise _wrong(here, "is no object")
            arrival_s = at_s + _number(fields, "t", here)
            if fields.get("type") == "subagent":
                agent = fields.get("agent_id") or f"agent{n + 1}"
                stack.append((f"{name}.{agent}", arrival_s, fields.get("requests") or []))
            else:
                turns.append((arrival_s, n, fields, here))
        for turn, (arrival_s, _, fields, here) in enumerate(sorted(turns, key=lambda item: item[:2]), 1):
            ids = _integers(fields.get("hash_ids"), "hash_ids", here) + first_id
            sizes = _count(fields, "in", here), _count(fields, "out", here)
            found.append(_checked(here, arrival_s, session, turn, *sizes, block_tokens, ids))
    found.sort(key=lambda request: request.arrival_s)
    return found, max((int(request.ids.max()) for request in found if len(request.ids)), default=first_id)


def _documents(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The sessions of one file: a line each, or one over all lines."""
    whole = False
    for where, line in _lines(path, None):
        try:
            document = json.loads(line)
        except ValueError:
            document, whole = _document(path, where), True
        if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
            raise _wrong(where, "no session of kv-cache-tester: expected an object with requests")
        yield document, where
        if whole:
            return


def _document(path: Path, where: str) -> object:
    data = b"".join(line for _, line in _lines(path, None))
    try:
        return json.loads(data)
    except ValueError as error:
        raise _wrong(where, f"broken JSON: {error}") from error


# -- lines and fields --------------------------------------------------------------------------------------------------


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[str, bytes]]:
    """Lines that are not empty, each with "file:line" for errors."""
    total = path.stat().st_size
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        lines: Iterable[bytes] = BufferedReader(gzip.GzipFile(fileobj=raw)) if zipped else raw
        n = 0
        try:
            for n, line in enumerate(lines, 1):
                if progress and n % _STEP_LINES == 0:
                    progress(raw.tell(), total)
                if not line.isspace():
                    yield f"{path}:{n}", line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}:{n + 1}: the gzip file is cut or damaged: {error}") from error


def _in_order(requests: Iterable[Request], path: Path) -> Iterator[Request]:
    before_s = float("-inf")
    for n, request in enumerate(requests, 1):
        if request.arrival_s < before_s:
            raise ValueError(
                f"{path}:{n}: arrives at {request.arrival_s} s, before the request above it: sort the trace"
            )
        before_s = request.arrival_s
        yield request


def _checked(
    where: str,
    arrival_s: float,
    session: str,
    turn: int,
    input_tokens: int,
    output_tokens: int,
    block_tokens: int,
    ids: Ids,
) -> Request:
    if turn < 1 or block_tokens < 1:
        raise _wrong(where, f"turn {turn} and block_tokens {block_tokens}: both count from 1")
    if len(ids) > -(-input_tokens // block_tokens):
        raise _wrong(where, f"{len(ids)} blocks of {block_tokens} tokens for an input of {input_tokens}")
    return Request(arrival_s, session, turn, input_tokens, output_tokens, block_tokens, ids)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise _wrong(where, f"broken JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _wrong(where, "no JSON object")
    return fields


def _integers(value: object, name: str, where: str) -> Ids:
    if not isinstance(value, list):
        raise _wrong(where, f"{name} is missing or no list")
    if not value:
        return np.empty(0, np.int64)
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _wrong(where, f"{name} holds something other than integers below 2^64")
    return array.astype(np.int64, copy=False)


def _number(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        raise _wrong(where, f"{name} is {value!r:.40}: expected a number, 0 or more")
    return float(value)


def _count(fields: Mapping[str, Any], name: str, where: str) -> int:
    value = _number(fields, name, where)
    if value != int(value):
        raise _wrong(where, f"{name} is {value!r}: expected a whole number")
    return int(value)


def _wrong(where: object, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise _wrong(where, f"{name} is {value!r}: expected a name")
    return str(value)
