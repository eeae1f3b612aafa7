"""KV that tests can recognise: every block's bytes follow from its key and its layer, so any mix-up shows."""

from __future__ import annotations

from typing import Any

import numpy as np

import flatcake_client as fc

PATIENT_S = 20.0  # of a client whose daemon answers; a dead one is a miss at once all the same


class Kv:
    """A space of a client, and KV for it. Bytes of block with key k in layer l: a pattern seeded by (k, l)."""

    def __init__(
        self,
        client: Any,
        *,
        layers: int = 3,
        plane_bytes: int = 8192,
        block_tokens: int = 16,
        model: str = "test",
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        self.layers, self.plane_bytes, self.block_tokens, self.shard = layers, plane_bytes, block_tokens, shard
        self.space = client.open_space(
            model=model, dtype="uint8", block_tokens=block_tokens, plane_bytes=[plane_bytes] * layers, shards=shards, shard=shard
        )  # fmt: skip

    def tokens(self, seed: int, blocks: int, *, after: np.ndarray | None = None) -> np.ndarray:
        """Token ids of a context: `after` and `blocks` more blocks that only this seed has."""
        fresh = np.random.default_rng(seed).integers(0, 1 << 31, blocks * self.block_tokens, dtype=np.int64)
        return fresh if after is None else np.concatenate([after, fresh])

    def bytes_of(self, keys: np.ndarray, layer: int) -> np.ndarray:
        """(n, plane_bytes) uint8."""
        words = np.frombuffer(keys.tobytes(), "<u8").reshape(-1, 2)
        seed = words[:, :1] ^ (words[:, 1:] * np.uint64(layer + 1 + 1000 * self.shard))
        steps = np.arange(-(-self.plane_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (seed + steps).view(np.uint8)[:, : self.plane_bytes].copy()

    def store(self, tokens: np.ndarray, session: str | None = "s", **hints: Any) -> Any:
        """Write what is not stored yet of a context; the turn."""
        keys = self.space.keys(tokens)
        with self.space.begin_turn(keys, session=session, **hints) as turn:
            self.write(turn, keys)
            turn.commit()
        return turn

    def write(self, turn: Any, keys: np.ndarray) -> None:
        mine = keys[turn.blocks.start : turn.blocks.stop]
        for layer in range(self.layers):
            turn.write_layer(layer, self.bytes_of(mine, layer), np.arange(len(mine)))

    def hit(self, tokens: np.ndarray, **options: Any) -> int:
        """Blocks of the context that come back; every one of them is compared, byte by byte."""
        keys = self.space.keys(tokens)
        with self.space.lookup(keys) as hit:
            if not hit.blocks:
                return 0
            slots = np.random.default_rng(hit.blocks).permutation(hit.blocks + 3)[: hit.blocks]
            target = [np.zeros((hit.blocks + 3, self.plane_bytes), np.uint8) for _ in range(self.layers)]
            restore = hit.restore(target, slots, **options)
            usable = restore.wait()
            for layer, pages in enumerate(target):
                expected = self.bytes_of(keys[:usable], layer)
                assert np.array_equal(pages[slots[:usable]], expected), f"layer {layer}: other bytes came back"
            return int(usable)


def connect(daemon: Any, **options: Any) -> Any:
    """A client that waits: on a busy machine the default deadlines make a miss of what is a hit."""
    return fc.connect(daemon.endpoint, **{"timeout_s": PATIENT_S} | options)
