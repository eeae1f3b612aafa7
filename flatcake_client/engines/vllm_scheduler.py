"""The half of the connector that lives in vLLM's scheduler: what is asked, what is loaded, what is stored. Moves no byte.

    new request --asked in a thread--> waiting (None) --> hit --blocks allocated--> load job --> workers say it ended
    request ends --> store job, its blocks held --> workers say they are free

- Nothing here waits for the daemon: a lookup is asked when its request comes and polled when it is to be scheduled.
- A request is loaded once an admission: after a load that failed it is computed.
- A context is stored only as far as its KV is computed, and never that of a request whose load has not ended.
- A request that ends, however, leaves nothing: its hit is released, its load is cancelled by the workers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from flatcake_client import Client, Hit, Space
from flatcake_client.background import Lookups
from flatcake_client.conversations import Conversations
from flatcake_client.engines.vllm_jobs import Load, StepJobs, Store, Tally, WeightsChanged
from flatcake_client.engines.vllm_settings import Adapters, Geometry, Settings
from flatcake_client.engines.weights import Weights
from flatcake_client.paged_kv import TurnFacts
from flatcake_transport.errors import Unavailable

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger("vllm.flatcake")

# An answer older than this is asked again when its request is scheduled: others may have stored its prefix meanwhile.
FRESH_S: Final = 2.0
# With nothing to compute, vLLM's loop would spin while a lookup is out, and take the interpreter from the thread that asks.
IDLE_S: Final = 0.0005
# Running requests wait this long for blocks that a store holds; then vLLM preempts one, as without a store.
FREES_WAIT_S: Final = 0.5
CLOSE_TIMEOUT_S: Final = 5.0
FLUSH: Final = "POST /reset_prefix_cache?reset_external=true to vLLM"


@dataclass(slots=True)
class _Known:
    """What is known of a request.

    `salt`: None: nothing is known of the weights, or not yet of its adapter. `offered`: tokens that vLLM has, and FlatCake beyond.
    """

    request: Request
    salt: bytes | None
    started: bool = False  # it has blocks, or had, in this admission: its KV is, at first, of the weights of then
    asked_s: float | None = None
    asked_again: bool = False  # because it was to be scheduled: the answer is used, however late vLLM comes for it
    admission: int = 0  # of vLLM: counts its preemptions
    offered: tuple[int, int] = (0, 0)
    inside: bool = False  # to be loaded in the step, not before it
    tried: bool = False  # to load, in this admission
    hit: Hit | None = None  # held while its load runs
    loaded_blocks: int = 0
    stored_blocks: int = 0


class SchedulerSide:
    """Belongs to vLLM's scheduler thread."""

    def __init__(
        self, client: Client, space: Space, shape: Geometry, settings: Settings, *, loads: bool, stores: bool
    ) -> None:
        self._client, self._space, self._settings = client, space, settings
        self._block_tokens = shape.block_tokens
        self._loads_on, self._stores_on = loads, stores
        self.stores_prefills = stores and settings.store_at == "prefill"
        self._lookups: Lookups[str, Hit] = Lookups(Hit.release)
        self._conversations = Conversations()
        self._known: dict[str, _Known] = {}
        self._loads: list[Load] = []
        self._stores: list[Store] = []
        self._storing: dict[str, tuple[float, int]] = {}  # since when, and how many blocks it holds
        self._owed: set[str] = set()  # requests that had a store: the workers will report each
        self._held_blocks = 0
        self._held_blocks_max = max(1, int(shape.blocks * settings.store_blocks_share))
        engine = uuid.uuid4().hex
        self._weights = Weights("", lambda: engine, FLUSH)
        self._adapters = Adapters()
        self._pool: Any = None
        self.tally = Tally()

    def bind_pool(self, pool: Any) -> None:
        """VLLM's blocks, that say how many requests share each."""
        self._pool = pool

    def arrived(self, request: Request) -> None:
        known = self._of(request)
        if self._asks(known):
            self._ask(request, known)

    def matched(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those; None: ask again. And whether they come between steps."""
        known = self._of(request)
        if not self._asks(known) or known.tried or request.skip_reading_prefix_cache:
            return 0, False
        answer = self._lookups.poll(request.request_id)
        if not answer.waiting and self._stale(known, answer.found):
            self._lookups.cancel(request.request_id)
            self._ask(request, known)
            known.asked_again = True
            return None, False
        if answer.waiting:
            return None, False
        known.asked_again = False
        self._name(known)  # what was asked has learned its adapter
        hit = answer.found
        if hit is None or known.salt is None:  # so many adapters that its own was forgotten meanwhile
            late = self._lookups.stats().late_total
            self.tally.add("lookups_late", late - self.tally.totals["lookups_late"])
            return 0, False
        blocks = min(hit.blocks, (request.num_tokens - 1) // self._block_tokens)
        tokens = blocks * self._block_tokens - computed_tokens
        if tokens < self._settings.tokens_min:
            return 0, False
        known.offered = (computed_tokens, tokens)
        known.inside = self._settings.layerwise and not hit.bytes_by_medium["ssd"]
        return tokens, not known.inside

    def allocated(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """VLLM has slots for the request; when it was offered tokens and takes them, they are loaded.

        If this fails call `lost`: vLLM waits for a load from here on.
        """
        known = self._of(request)
        self._name(known)
        known.started = True
        if not external_tokens or known.tried:
            return
        assert known.salt is not None, "nothing was offered"
        # The workers look up for themselves; this hit only keeps the blocks until they have.
        hit = self._lookups.take(request.request_id)
        first = known.offered[0] // self._block_tokens
        end = first + external_tokens // self._block_tokens
        known.tried, known.hit, known.loaded_blocks = True, hit, end
        self._loads.append(
            Load(
                request.request_id,
                tuple(request.block_hashes[:end]),
                known.salt,
                first,
                tuple(block_ids[first:end]),
                hit.bytes_by_medium["ssd"] if hit is not None else 0,
                known.inside,
            )
        )
        self.tally.add("loads")
        self.tally.add("hit_tokens", external_tokens)

    def lost(self, request: Request, block_ids: Sequence[int], external_tokens: int) -> None:
        """The workers are to say that nothing of a load came."""
        if external_tokens and not any(load.request_id == request.request_id for load in self._loads):
            known = self._known[request.request_id]  # it was offered tokens
            known.tried = True
            first = known.offered[0] // self._block_tokens
            end = first + external_tokens // self._block_tokens
            blocks = tuple(block_ids[first:end])
            self._loads.append(Load(request.request_id, (), b"", first, blocks, 0, known.inside))

    def sources(self, request: Request, external_tokens: int) -> dict[str, int]:
        """Of the tokens to be loaded, how many lie in "memory" and on "ssd"."""
        known = self._known.get(request.request_id)
        if known is None or known.hit is None:
            return {}
        in_memory = sum(run.blocks for run in known.hit.runs if not run.file_id)
        behind = known.offered[0] // self._block_tokens
        memory = min(external_tokens, max(0, in_memory - behind) * self._block_tokens)
        return {"memory": memory, "ssd": external_tokens - memory}

    def jobs(self, output: SchedulerOutput) -> StepJobs:
        """Of this step. What vLLM waits for is among them, so nothing here may fail."""
        loads, self._loads = tuple(self._loads), []
        stores, self._stores = tuple(self._stores), []
        idle = output.total_num_scheduled_tokens == 0
        return StepJobs(loads, stores, frozenset(output.preempted_req_ids or ()), idle, self._weights_salt())

    def pause(self, jobs: StepJobs) -> None:
        """When nothing is computed and an answer is out, a moment is left to the threads."""
        if jobs.idle and not jobs.loads and not jobs.stores and self._lookups.waiting():
            time.sleep(IDLE_S)

    def heard(self, output: KVConnectorOutput) -> None:
        """From the workers: loads that ended, well or not, and stores that hold no blocks any more."""
        for request_id in output.finished_sending or ():
            self._let_go(request_id)
        for request_id in output.finished_recving or ():
            known = self._known.get(request_id)
            if known is not None:
                hit, known.hit = known.hit, None
                self._lookups.discard(hit)
        told = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(told, WeightsChanged) and told.weights == self._weights_salt():
            self._weights.changed()
            self._renamed()
            log.warning("FlatCake: weights were changed without a reset: nothing is found or stored until %s", FLUSH)

    def ended(self, request: Request, block_ids: Sequence[int]) -> None:
        """The request is over; what is new of its context is stored. Then `owes` says whether its blocks are held."""
        known = self._known.pop(request.request_id, None)
        self._lookups.cancel(request.request_id)
        if known is None:
            return
        if known.admission != request.num_preemptions:
            self._owed.discard(request.request_id)
        # Of a load under way the workers have a lease of their own, and they end it.
        self._lookups.discard(known.hit)
        if self._stores_on and request.status != RequestStatus.FINISHED_ERROR:
            self._store_turn(request, known, block_ids)

    def owes(self, request_id: str) -> bool:
        """Whether the workers will report a store of this request, so that vLLM keeps its blocks till then."""
        return request_id in self._owed

    def holds_blocks(self) -> bool:
        """Whether a store will give blocks back in a moment: vLLM waits for that rather than preempt."""
        since = min((since for since, _ in self._storing.values()), default=None)
        return since is not None and time.monotonic() - since < FREES_WAIT_S

    def reset(self) -> None:
        """All that was stored up to now is never found by this engine again: its weights may have changed."""
        self._weights.changed()
        self._weights.flushed()
        self._renamed()
        log.info("FlatCake: what was stored before this reset is not used any more")

    def _renamed(self) -> None:
        """Requests that have no KV yet are of the weights as they are called now."""
        for request_id, known in self._known.items():
            if not known.started:
                self._lookups.cancel(request_id)
                known.asked_s = None
                known.salt = self._salt(known.request)

    def close(self) -> None:
        self._lookups.close(CLOSE_TIMEOUT_S)
        self._client.close(CLOSE_TIMEOUT_S)

    def _of(self, request: Request) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            known = _Known(request, self._salt(request))
        elif known.admission != request.num_preemptions:
            self._lookups.cancel(request.request_id)
            self._lookups.discard(known.hit)
            self._owed.discard(request.request_id)  # the workers have let go of what it had before
            known = _Known(request, self._salt(request), admission=request.num_preemptions)
        else:
            return known
        self._known[request.request_id] = known
        return known

    def _salt(self, request: Request) -> bytes | None:
        """VLLM's hashes have an adapter's name; what that name stands for may differ from one start to the next."""
        weights, adapter = self._weights_salt(), self._adapters.salt(request.lora_request)
        return None if weights is None or adapter is None else weights + adapter

    def _name(self, known: _Known) -> None:
        """Once it has KV, that is of whatever was loaded when it began."""
        if known.salt is None and not known.started:
            known.salt = self._salt(known.request)

    def _asks(self, known: _Known) -> bool:
        """Whether there is anything to find; if not, its adapter may have to be learned before it can be stored."""
        if self._weights_salt() is None or (known.started and known.salt is None):
            return False
        return self._loads_on or known.salt is None

    def _weights_salt(self) -> bytes | None:
        try:
            return self._weights.salt()
        except Unavailable:
            return None

    def _pure(self, known: _Known) -> bytes | None:
        """Its salt; None: it may have KV of several weights: they or its adapter's files changed, or there was a reset, since it started."""
        salt = self._salt(known.request)
        return salt if salt == known.salt else None

    def _ask(self, request: Request, known: _Known) -> None:
        blocks = (request.num_tokens - 1) // self._block_tokens
        known.asked_s = time.monotonic()
        self.tally.add("lookups")
        look = partial(self._look, request.block_hashes[:blocks], self._weights_salt() or b"", request.lora_request)
        self._lookups.submit(request.request_id, look, self._settings.lookup_timeout_s)

    def _look(self, hashes: list[bytes], weights: bytes, adapter: LoRARequest | None) -> Hit | None:
        salt = self._adapters.learn(adapter)
        if not hashes or salt is None or not self._loads_on:
            return None
        keys = self._space.keys_of_hashes(hashes, weights + salt)
        hit = self._space.lookup(keys, timeout_s=self._settings.lookup_timeout_s)
        if hit.blocks:
            return hit
        hit.release()
        return None

    def _stale(self, known: _Known, hit: Hit | None) -> bool:
        """Whether to ask (again): not asked yet, too old, or the lease on what was found has ended."""
        if known.asked_s is None:
            return True
        if known.asked_again:
            return False  # steps, or answers, that take longer than an answer is fresh: it would be asked for ever
        return time.monotonic() - known.asked_s > FRESH_S or (hit is not None and not hit.lease.alive())

    def _store_turn(self, request: Request, known: _Known, block_ids: Sequence[int]) -> None:
        blocks = min(
            len(request.block_hashes),
            len(block_ids),
            # The last token was sampled, not computed.
            min(request.num_computed_tokens, request.num_tokens - 1) // self._block_tokens,
        )
        hashes = request.block_hashes[:blocks]
        session = _session(request)
        past = self._conversations.past(session, hashes)
        if request.num_output_tokens:
            self._conversations.turned(session, hashes, past, request.num_output_tokens)
        if blocks <= max(known.loaded_blocks, known.stored_blocks) or (salt := self._pure(known)) is None:
            return  # nothing new; so it is, too, with a load that has not ended
        shares = self._share_counts(block_ids[:blocks])
        facts = TurnFacts(session, request.num_tokens, past.reply_tokens, past.turns + 1, shares)
        self._store(Store(request.request_id, tuple(hashes), salt, tuple(block_ids[:blocks]), facts))

    def _store(self, job: Store) -> bool:
        fits = self._held_blocks + len(job.block_ids) <= self._held_blocks_max or not self._storing
        if not fits or len(self._storing) >= self._settings.stores_max or job.request_id in self._storing:
            self.tally.add("stores_dropped")
            return False
        self._stores.append(job)
        self._owed.add(job.request_id)
        self._storing[job.request_id] = (time.monotonic(), len(job.block_ids))
        self._held_blocks += len(job.block_ids)
        return True

    def _let_go(self, request_id: str) -> None:
        self._owed.discard(request_id)
        _, blocks = self._storing.pop(request_id, (0.0, 0))
        self._held_blocks -= blocks

    def _share_counts(self, block_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Running requests that have each block; only heads are shared, so the rest is not looked at."""
        if self._pool is None:
            return None
        counts = [1] * len(block_ids)
        for position, block_id in enumerate(block_ids):
            counts[position] = max(1, self._pool.blocks[block_id].ref_cnt)
            if counts[position] == 1:
                break
        return tuple(counts) if counts and counts[0] > 1 else None

    def store_prefill(self, output: SchedulerOutput, request_id: str) -> None:
        """A prompt whose last block is computed in this step; the workers write each layer when it is."""
        known, state = self._known.get(request_id), output.kv_connector_block_state
        if known is None or known.stored_blocks or state is None:
            return
        request = known.request
        blocks = request.num_prompt_tokens // self._block_tokens
        computed_tokens = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
        if computed_tokens < request.num_prompt_tokens or blocks <= known.loaded_blocks:
            return
        salt = self._pure(known)
        if salt is None:
            return
        ids = state.resolve_block_ids(request_id)[0][:blocks]
        hashes, session = request.block_hashes[:blocks], _session(request)
        past = self._conversations.past(session, hashes)
        shares = self._share_counts(ids)
        facts = TurnFacts(session, request.num_prompt_tokens, past.reply_tokens, past.turns + 1, shares)
        self._stores.append(Store(request_id, tuple(hashes), salt, tuple(ids), facts, prefill=True))
        self._owed.add(request_id)
        known.stored_blocks = blocks


def _session(request: Request) -> str | None:
    params = request.kv_transfer_params or {}
    session = getattr(request, "session_id", None) or params.get("session_id") or params.get("session")
    return str(session) if session else None
