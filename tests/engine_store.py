"""Client, Space, Hit and Turn over a dict: the public surface of `flatcake_client`, with faults that tests switch on.

Blocks are kept as the bytes of each layer. Written from DESIGN section 4, not from the client's code.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

import flatcake_client as fc
from flatcake_client.keys import chain_keys, root_key
from flatcake_client.records import Part, Run
from flatcake_transport.address import Address, Medium
from flatcake_transport.space import SpaceSpec

NAMES = ("lookup", "restore", "wait_layer", "begin_turn", "write_layer", "commit")


class InMemoryClient:
    def __init__(self):
        self.blocks = {}  # key bytes -> list of bytes, one a layer
        self.turns = []  # arguments of begin_turn, and what was asked to be stored
        self.pinned = 0
        self.open_turns = 0
        self.fail = {}  # name of a verb -> exception
        self.restore_blocks_max = None
        self.restore_cut_layer = 0  # the first that lacks the blocks beyond
        self.slow_layers = {}  # layer -> called before it lands
        self.layer_waits = []

    def break_at(self, name):
        if name in self.fail:
            raise self.fail[name]

    def open_space(self, model, dtype, block_tokens, plane_bytes, shards=1, shard=0, weights="", layout=""):
        return InMemorySpace(self, SpaceSpec(model, dtype, block_tokens, tuple(plane_bytes), shards, weights, layout))


class InMemorySpace:
    def __init__(self, client, spec):
        self.client, self.spec = client, spec

    def keys(self, token_ids, salt=b"", extra=None):
        return chain_keys(token_ids, self.spec.block_tokens, root_key(self.spec.fingerprint, salt), extra)

    def lookup(self, keys, pin=True, timeout_s=None):
        self.client.break_at("lookup")
        found = 0
        while found < len(keys) and keys[found].tobytes() in self.client.blocks:
            found += 1
        return InMemoryHit(self, keys[:found])

    def begin_turn(
        self,
        keys,
        session=None,
        context_tokens=None,
        previous_reply_tokens=None,
        share_counts=None,
        turn=None,
        salt=b"",
    ):
        self.client.break_at("begin_turn")
        missing = [i for i, key in enumerate(keys) if key.tobytes() not in self.client.blocks]
        blocks = range(missing[0], missing[-1] + 1) if missing else range(0)
        hints = SimpleNamespace(
            session=session,
            context_tokens=context_tokens,
            previous_reply_tokens=previous_reply_tokens,
            share_counts=share_counts,
            turn=turn,
            salt=salt,
        )
        self.client.turns.append((hints, blocks))
        return InMemoryTurn(self, keys, blocks, missing)


class InMemoryHit:
    failure = None

    def __init__(self, space, keys):
        self.space, self.keys, self.blocks, self.spec = space, keys, len(keys), space.spec
        self.tokens = len(keys) * space.spec.block_tokens
        self.runs = (Run(Address.of(Medium.SSD, 0, 4096), len(keys), 0, len(keys), 1 << 20, 1, 0),) if len(keys) else ()

    def __enter__(self):
        self.space.client.pinned += 1
        return self

    def __exit__(self, *_):
        self.space.client.pinned -= 1

    def restore(self, target, slots, first_block=0, timeout_s=None, ending=None):
        assert self.space.client.pinned
        self.space.client.break_at("restore")
        return InMemoryRestore(self, target, slots)


class InMemoryRestore:
    """Layers come one by one, as they are waited for; what has not come is noise."""

    stats = fc.RestoreStats(read_commands=3, bytes_read=5)

    def __init__(self, hit, target, slots):
        self.hit, self.target, self.slots = hit, target, slots
        self.closed = False
        assert len(target) == hit.spec.layers
        for pages in target:
            for slot in slots:
                pages[int(slot)].fill_(7)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True

    def wait_layer(self, layer):
        client = self.hit.space.client
        client.layer_waits.append(layer)
        if layer in client.slow_layers:
            client.slow_layers[layer]()
        client.break_at("wait_layer")
        usable = self.hit.blocks if client.restore_blocks_max is None else client.restore_blocks_max
        assert not self.closed
        if usable < self.hit.blocks and layer >= client.restore_cut_layer:
            self.wait()
            error = fc.RestoreUnavailable("cut")
            error.usable_blocks = usable
            raise error
        self._bring(layer, self.hit.blocks)

    def wait(self):
        client = self.hit.space.client
        client.break_at("wait_layer")
        usable = self.hit.blocks if client.restore_blocks_max is None else client.restore_blocks_max
        for layer in range(len(self.target)):
            self._bring(layer, usable)
        return usable

    def _bring(self, layer, usable):
        pages = self.target[layer]
        for slot, key in zip(self.slots, self.hit.keys[:usable], strict=False):
            data = np.frombuffer(self.hit.space.client.blocks[key.tobytes()][layer], np.uint8)
            page = torch.from_numpy(data.copy()).view(pages.dtype).view(pages.shape[1:])
            pages[int(slot)].copy_(page)


class InMemoryTurn:
    def __init__(self, space, keys, blocks, missing):
        self.space, self.keys, self.blocks, self.missing = space, keys, blocks, missing
        self.layers = {}
        self.parts = (
            (Part(Address.of(Medium.SSD, 0, 4096), blocks.start, len(blocks), 1 << 20, 1, 0, "first-turn"),)
            if missing
            else ()
        )

    def __enter__(self):
        self.space.client.open_turns += 1
        return self

    def __exit__(self, *_):
        self.space.client.open_turns -= 1

    def write_layer(self, layer, source, slots):
        self.space.client.break_at("write_layer")
        assert layer not in self.layers
        assert len(slots) == len(self.blocks)
        pages = source[torch.from_numpy(slots)].contiguous().flatten(1).view(torch.uint8).numpy()
        assert pages.shape[1] == self.space.spec.plane_bytes[layer]
        self.layers[layer] = [page.tobytes() for page in pages]

    def commit(self):
        self.space.client.break_at("commit")
        if not self.missing:
            return True
        assert sorted(self.layers) == list(range(self.space.spec.layers))
        for i in self.missing:
            self.space.client.blocks[self.keys[i].tobytes()] = [
                self.layers[layer][i - self.blocks.start] for layer in range(self.space.spec.layers)
            ]
        return True
