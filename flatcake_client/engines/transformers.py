"""Session prefixes for a Hugging Face causal LM: restored before prefill, stored after the reply. Translates, decides nothing.

    prompt ids --keys--> hit --restore--> landing (K and V of each layer) --> DynamicCache --> forward over the rest
    DynamicCache --> pages of the turn's blocks --> turn --commit--> the next request's hit

`generate` overlaps them layer by layer (prefill.py): a layer is waited for just before its attention, and a long prompt is
stored while it is computed. A prompt with few new blocks is stored with its reply, in one segment: reading it back takes half
as many commands.

One plane is one layer: K, then V, of `block_tokens` tokens, each (kv_heads, tokens, head_dim). The last token of a prompt is
never restored, since its logits are what prefill is for.

- Text never depends on FlatCake: whatever fails in restore or store is a count and a log line, and tokens are computed.
- A forward that computes on landed layers ends with an error when a later layer will not land; what it did is thrown away, and
  the prompt is computed anew after the blocks that are in place in all layers.
- A request only finds KV of equal weights: the space names a digest of the parameters and the configuration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from flatcake_client import Client, Hit, Overloaded, Part, RestoreStats, Space, Turn, Unavailable
from flatcake_client.arrival import Arrival
from flatcake_client.deadline import checked_timeout
from flatcake_client.engines.edge import Edge
from flatcake_client.engines.landing import Landing, Landings, blocks_by_place, bytes_by_medium
from flatcake_client.engines.probing import forward_arguments, probe, weights_digest

if TYPE_CHECKING:
    from flatcake_client.engines.prefill import KeysValues, PromptStore

log = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 64
LAYOUT: Final = "transformers/1: k v, heads tokens dim"
# New blocks from which a prompt is stored while it is computed, as a segment of its own: 1024 tokens are seconds of prefill.
STREAM_BLOCKS_MIN: Final = 16
FIRST_TURN: Final = "first-turn"  # what the daemon says of where it placed such a turn


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What the caller knows of a request, and FlatCake cannot.

    Attributes:
        session: name of the conversation; None: inferred from the tokens.
        previous_reply_tokens: length of the last reply in the conversation; None: not known.
        shared_tokens: leading tokens that other requests have, too, e.g. the system prompt.
        sharers: how many requests have them.
        salt: whatever must not share KV with others: tenant, LoRA adapter.
    """

    session: str | None = None
    previous_reply_tokens: int | None = None
    shared_tokens: int = 0
    sharers: int = 1
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore brought. `bytes_read`: from files, with alignment and gaps; `restore_s`: all of the moving, no lookup.

    `waited_s`: how long prefill stood still for it; the rest was overlapped. `blocks_by_place`: "ssd@7" is SSD of node 7.
    """

    tokens: int = 0
    bytes_by_medium: dict[str, int] = field(default_factory=dict)
    blocks_by_place: dict[str, int] = field(default_factory=dict)
    read_commands: int = 0
    bytes_read: int = 0
    restore_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One request, answered. `computed_tokens`: of the prompt; `ttft_s`: from the call to the first token, restore included."""

    tokens: list[int]
    prompt_tokens: int
    restored: Restored
    stored: tuple[Part, ...]
    ttft_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.restored.tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. Prompt tokens are restored or computed, exactly one."""

    requests: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    reply_tokens: int = 0
    stored_blocks: int = 0
    restores_cut: int = 0  # fewer blocks came back than were found: the rest was computed
    restores_failed: int = 0
    stores_refused: int = 0
    stores_failed: int = 0


class TransformersEngine:
    """A causal LM with a session cache behind it. Thread-safe as far as the model's forward is: torch's is, in eval mode.

    Batches of one: Hugging Face's caches hold one sequence length, prefixes have many.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        name: str | None = None,
        weights: str | None = None,
        block_tokens: int = BLOCK_TOKENS,
        timeout_s: float | None = None,
        overlap: bool = True,
        stream_blocks_min: int = STREAM_BLOCKS_MIN,
    ) -> None:
        """Make a space for the model; works without a daemon.

        Args:
            model: Hugging Face causal LM whose cache is plain `DynamicLayer`s: no sliding window, state space or quantised cache.
            client: of `flatcake_client.connect`; the caller closes it.
            name: of the model, for people. Default: the configuration's.
            weights: version of the parameters, if the caller knows one. Default: a digest of samples of each parameter, which
                tells any trained or random models apart, but not two that differ in a few numbers only.
            block_tokens: tokens a block.
            timeout_s: of a restore; past it what is in place is used. Default: the client's.
            overlap: False restores before prefill and stores after the reply, instead of layer by layer beside prefill.
            stream_blocks_min: a prompt with fewer new blocks is stored with its reply.

        Raises:
            ValueError: the model is in training mode, its cache is not of that kind, or a timeout without end.
        """
        self._model = model
        self._arguments = forward_arguments(model)
        self._dtype, self._layers = probe(model, self._arguments)
        self._block_tokens = block_tokens
        self._timeout_s = None if timeout_s is None else checked_timeout("timeout_s", timeout_s)
        self._overlap, self._stream_blocks_min = overlap, stream_blocks_min
        item = self._dtype.itemsize
        config = model.config
        self._space = client.open_space(
            model=name or str(getattr(config, "name_or_path", "")) or config.model_type,
            dtype=str(self._dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            plane_bytes=[2 * layer.kv_heads * block_tokens * layer.head_dim * item for layer in self._layers],
            weights=weights if weights is not None else weights_digest(model),
            layout=LAYOUT,
        )
        self._landings = Landings(self._layers, self._dtype, block_tokens)
        self._edge = Edge(log, "its tokens are computed")

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        hints: RequestHints = RequestHints(),
        *,
        stop_tokens: Collection[int] = (),
        cached: bool = True,
    ) -> Reply:
        """Answer greedily: the same tokens with FlatCake, without it, and when it fails half way.

        Args:
            prompt: token ids of the whole context.
            max_new_tokens: 1 or more; the reply ends earlier with one of `stop_tokens`, which is part of it.
            hints: see RequestHints.
            cached: False neither restores nor stores.

        Raises:
            ValueError: an empty prompt, or no tokens wanted.
        """
        if not len(prompt) or max_new_tokens < 1:
            raise ValueError(f"{max_new_tokens} tokens after a prompt of {len(prompt)}: expected 1 or more of each")
        started_s = time.perf_counter()
        tokens = [int(token) for token in prompt]
        prompt_store: PromptStore | None = None
        if cached and self._overlap:
            first, cache, restored, prompt_store = self._prefill(tokens, hints)
        else:
            cache, restored = self.restore(tokens, hints) if cached else (self._empty_cache(), Restored())
            first = self._forward(tokens[restored.tokens :], cache)
        ttft_s = time.perf_counter() - started_s
        greedy, reply = self.decode([first], cache), [first]
        while len(reply) < max_new_tokens and reply[-1] not in stop_tokens:
            reply.append(next(greedy))
        stored = self._store_all([*tokens, *reply], cache, hints, prompt_store) if cached else ()
        self._edge.count(
            requests=1,
            restored_tokens=restored.tokens,
            computed_tokens=len(tokens) - restored.tokens,
            reply_tokens=len(reply),
        )
        return Reply(reply, len(tokens), restored, stored, ttft_s)

    def restore(self, prompt: Sequence[int], hints: RequestHints = RequestHints()) -> tuple[Any, Restored]:
        """A `DynamicCache` with the longest stored prefix of a prompt, less its last token; empty if anything fails.

        For the model's own `generate`: `cache, _ = engine.restore(ids)`, then pass ids and cache to it. The caller owns the cache.
        """
        try:
            keys = self._space.keys(prompt[: len(prompt) - 1], salt=hints.salt)
            with self._space.lookup(keys) as hit:
                if hit.blocks:
                    return self._bring(hit)
                self._edge.count(restores_failed=int(hit.failure is not None))
        except Exception as error:  # noqa: BLE001 - an engine's edge: whatever it is, the tokens are computed
            self._edge.count(restores_failed=1)
            self._edge.failed("a restore", error)
        return self._empty_cache(), Restored()

    def store(self, tokens: Sequence[int], cache: Any, hints: RequestHints = RequestHints()) -> tuple[Part, ...]:
        """Store those full blocks of a context that are not stored yet.

        Args:
            tokens: the ids whose KV the cache holds, from its first on; more ids than the cache holds are left out.
            cache: as the model filled it. Not kept.
            hints: as given to `restore`.

        Returns:
            What was stored, where and why. Nothing, if it failed or was refused.
        """
        return self._store_all(tokens, cache, hints, None)

    def decode(self, tokens: Sequence[int], cache: Any) -> Iterator[int]:
        """Greedy tokens, without end, after what the cache holds and then these tokens. The cache grows as they are taken."""
        fed = list(tokens)
        while True:
            fed = [self._forward(fed, cache)]
            yield fed[0]

    @property
    def space(self) -> Space:
        """Where the model's blocks are."""
        return self._space

    def stats(self) -> EngineStats:
        return EngineStats(**self._edge.counts())

    def _bring(self, hit: Hit) -> tuple[Any, Restored]:
        landing = self._landings.take(hit.blocks)
        started_s = time.perf_counter()
        with hit.restore(landing.pages(hit.blocks), np.arange(hit.blocks), timeout_s=self._timeout_s) as restore:
            usable = restore.wait()
            stats = restore.stats
        restore_s = time.perf_counter() - started_s
        return self._landed(landing, hit, usable), self._told(hit, usable, stats, restore_s, restore_s)

    def _prefill(self, tokens: list[int], hints: RequestHints) -> tuple[int, Any, Restored, PromptStore | None]:
        """The first token, the cache behind it, what was restored for it, and the store of the prompt, if one runs."""
        prompt_store: PromptStore | None = None
        try:
            try:
                keys = self._space.keys(tokens[:-1], salt=hints.salt)
                with self._space.lookup(keys) as hit:
                    if len(tokens) // self._block_tokens - hit.blocks >= self._stream_blocks_min:
                        prompt_store = self._prompt_store(tokens, hints)
                    if hit.blocks:
                        return self._prefill_after(hit, tokens, prompt_store)
                    self._edge.count(restores_failed=int(hit.failure is not None))
            except Exception as error:  # noqa: BLE001 - an engine's edge: whatever it is, the tokens are computed
                self._edge.count(restores_failed=1)
                self._edge.failed("a restore", error)
                if prompt_store is not None:
                    prompt_store.drop()
                    prompt_store = None
            cache = self._prefill_cache(0, lambda _: (), prompt_store)
            return self._forward(tokens, cache), cache, Restored(), prompt_store
        except BaseException:
            if prompt_store is not None:
                prompt_store.drop()  # it would wait for the layers that lack, and hold its turn's room, for ever
            raise

    def _prefill_after(
        self, hit: Hit, tokens: list[int], prompt_store: PromptStore | None
    ) -> tuple[int, Any, Restored, PromptStore | None]:
        from flatcake_client.engines.prefill import NotLanded

        landing = self._landings.take(hit.blocks)
        with (
            hit.restore(landing.pages(hit.blocks), np.arange(hit.blocks), timeout_s=self._timeout_s) as restore,
            Arrival(restore, len(self._layers)) as arrival,
        ):

            def land(layer: int) -> KeysValues:
                arrival.wait_layer(layer)
                return landing.keys_values(layer, hit.blocks, hit.blocks)

            cache = self._prefill_cache(hit.tokens, land, prompt_store)
            first = None
            try:
                first = self._forward(tokens[hit.tokens :], cache)
            except NotLanded:
                if prompt_store is not None:
                    prompt_store.drop()
                    prompt_store = None
            usable = hit.blocks if first is not None else int(getattr(arrival.failure(), "usable_blocks", 0))
            restored = self._told(hit, usable, restore.stats, arrival.brought_s, arrival.waited_s)
        if first is None:
            cache = self._landed(landing, hit, usable)
            first = self._forward(tokens[restored.tokens :], cache)
        else:
            self._landings.give(landing)  # the cache joined what landed with what was computed, in memory of its own
        return first, cache, restored, prompt_store

    def _prefill_cache(self, tokens: int, land: Any, prompt_store: PromptStore | None) -> Any:
        from flatcake_client.engines.prefill import PrefillLayer

        cache = self._empty_cache()
        cache.layers = [
            PrefillLayer(tokens, partial(land, layer), partial(prompt_store.put, layer) if prompt_store else None)
            for layer in range(len(self._layers))
        ]
        return cache

    def _prompt_store(self, tokens: list[int], hints: RequestHints) -> PromptStore:
        from flatcake_client.engines.prefill import PromptStore

        return PromptStore(partial(self._begin, tokens, hints), self._pages, len(self._layers))

    def _landed(self, landing: Landing, hit: Hit, usable: int) -> Any:
        """A cache of the blocks that are in place."""
        cache = self._empty_cache()
        copied = True
        for layer in range(len(self._layers) if usable else 0):
            landed = landing.keys_values(layer, hit.blocks, usable)
            held = cache.update(*landed, layer)
            copied &= not {tensor.data_ptr() for tensor in held} & {tensor.data_ptr() for tensor in landed}
        if copied:  # else the cache lives in the landing, which is then no longer ours
            self._landings.give(landing)
        return cache

    def _told(self, hit: Hit, usable: int, stats: RestoreStats, restore_s: float, waited_s: float) -> Restored:
        """What a restore was, counted and logged."""
        if usable < hit.blocks:
            self._edge.count(restores_cut=1)
            self._edge.failed("a restore", Unavailable(f"{usable} of {hit.blocks} blocks came back"))
        else:
            self._edge.worked("a restore")
        places = blocks_by_place(hit, usable)
        return Restored(
            tokens=usable * self._block_tokens,
            bytes_by_medium=bytes_by_medium(places, sum(hit.spec.plane_bytes)),
            blocks_by_place=places,
            read_commands=stats.read_commands,
            bytes_read=stats.bytes_read,
            restore_s=restore_s,
            waited_s=waited_s,
        )

    def _store_all(
        self, tokens: Sequence[int], cache: Any, hints: RequestHints, prompt_store: PromptStore | None
    ) -> tuple[Part, ...]:
        """Have a prompt's store come to its end, and store what else is not stored. Nothing more after a failure."""
        try:
            parts = prompt_store.wait() if prompt_store is not None else ()
            # A reply's last token was never fed, so the cache does not hold it.
            more = self._write(tokens[: cache.get_seq_length()], cache, hints, after=parts)
        except Overloaded as error:
            self._edge.count(stores_refused=1)
            log.info("a turn was not stored: %s", error)
        except Exception as error:  # noqa: BLE001 - an engine's edge: whatever it is, the reply is given
            self._edge.count(stores_failed=1)
            self._edge.failed("a store", error)
        else:
            self._edge.worked("a store")
            self._edge.count(stored_blocks=sum(part.blocks for part in (*parts, *more)))
            return (*parts, *more)
        return ()

    def _begin(self, tokens: Sequence[int], hints: RequestHints, after: Sequence[Part] = ()) -> Turn:
        """`after`: what was stored of the same request before, so that this is no turn of its own to whoever places it."""
        keys = self._space.keys(tokens, salt=hints.salt)
        shared = hints.shared_tokens // self._block_tokens
        return self._space.begin_turn(
            keys,
            session=hints.session,
            context_tokens=len(tokens),
            previous_reply_tokens=hints.previous_reply_tokens,
            share_counts=np.where(np.arange(len(keys)) < shared, hints.sharers, 1).tolist(),
            turn=1 if any(part.reason == FIRST_TURN for part in after) else None,
            salt=hints.salt,
        )

    def _write(self, tokens: Sequence[int], cache: Any, hints: RequestHints, after: Sequence[Part]) -> tuple[Part, ...]:
        with self._begin(tokens, hints, after) as turn:
            slots = np.arange(len(turn.blocks))
            for layer in range(len(self._layers) if len(slots) else 0):
                held = cache.layers[layer]
                turn.write_layer(layer, self._pages((held.keys, held.values), turn.blocks), slots)
            turn.commit()
        return turn.parts

    def _pages(self, held: KeysValues, blocks: range) -> torch.Tensor:
        """(blocks, 2, kv_heads, block_tokens, head_dim): a copy, in the order of a plane's bytes."""
        tokens = slice(blocks.start * self._block_tokens, blocks.stop * self._block_tokens)
        parts = [tensor[0, :, tokens].unflatten(1, (len(blocks), -1)) for tensor in held]  # type: ignore[no-untyped-call]
        return torch.stack(parts).permute(2, 0, 1, 3, 4).contiguous()

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], cache: Any) -> int:
        """Feed tokens; the greedy next one."""
        ids = torch.tensor([tokens], device=self._layers[0].device)
        output = self._model(input_ids=ids, use_cache=True, **{self._arguments[0]: cache}, **self._arguments[1])
        return int(output.logits[0, -1].argmax())
