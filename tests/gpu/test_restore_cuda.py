"""The whole way on a GPU: a turn gathered from device slots, and restored into device slots from both media.

The same story runs on CPU tensors everywhere, through the code that a device gets, so that only the device is left untested
without one.
"""

from __future__ import annotations

import numpy as np
import pytest
from devices import DEVICES, device_path
from kv import Kv, connect
from layouts import LAYOUTS, bytes_of, fill, layout_pages, torch_zeros

from flatcake_transport.movers.gds import gds_available

torch = pytest.importorskip("torch", reason="no torch: restores into tensors were not tested")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", ["ssd", "memory"])
def test_a_turn_comes_back_into_slots_of_the_device(daemon, device, home, monkeypatch):
    """One turn a layout, stored from slots in one order and restored into slots in another, of the next layout."""
    device_path(device, monkeypatch)
    with connect(daemon) as client:
        kv = Kv(client, plane_bytes=8 << 10)
        names = list(LAYOUTS)
        for seed, (stored, restored) in enumerate(zip(names, names[1:] + names[:1], strict=True)):
            keys = kv.space.keys(kv.tokens(seed, 24))
            slots = np.random.default_rng(seed).permutation(40)[:24]
            counts = [2] * 24 if home == "memory" else None
            with kv.space.begin_turn(keys, session=f"s{seed}", share_counts=counts) as turn:
                for layer in range(kv.layers):
                    pages = pages_of(stored, kv, device)
                    fill(pages, slots, kv.bytes_of(keys, layer))
                    turn.write_layer(layer, pages, slots)
                turn.commit()
            assert turn.parts[0].segment.medium.name.lower() == home
            target = [pages_of(restored, kv, device) for _ in range(kv.layers)]
            with kv.space.lookup(keys) as hit:
                restore = hit.restore(target, slots[::-1])
                for layer in range(kv.layers):
                    restore.wait_layer(layer)
                    expected = np.zeros((40, kv.plane_bytes), np.uint8)
                    expected[slots[::-1]] = kv.bytes_of(keys, layer)
                    assert np.array_equal(bytes_of(target[layer]), expected), f"{stored} to {restored}, layer {layer}"
        assert device in client.stats().movers["memory"].path
        if device == "cuda" and home == "ssd" and gds_available() is None:
            assert any(name.startswith("files to cuda") for name in client.stats().movers), "GDS was there and not used"


def pages_of(layout, kv, device):
    return layout_pages(layout, 40, kv.plane_bytes, lambda shape, item: torch_zeros(shape, item, device))
