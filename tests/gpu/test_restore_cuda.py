"""The whole way on a GPU: a turn gathered from device slots, and restored into device slots from both media.

The same story runs on CPU tensors everywhere (device "cpu"), so that only the device is left untested without one.
"""

from __future__ import annotations

import numpy as np
import pytest
from kv import Kv, connect

from flatcake_transport.movers.gds import gds_available

torch = pytest.importorskip("torch", reason="no torch: restores into tensors were not tested")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no CUDA device: restores into it were not tested"
            ),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", ["ssd", "memory"])
def test_a_turn_comes_back_into_slots_of_the_device(daemon, device, home):
    with connect(daemon) as client:
        kv = Kv(client, plane_bytes=32 << 10)
        tokens = kv.tokens(1, 24)
        keys = kv.space.keys(tokens)
        slots = np.random.default_rng(0).permutation(40)[:24]
        counts = [2] * 24 if home == "memory" else None
        with kv.space.begin_turn(keys, session="s", share_counts=counts) as turn:
            for layer in range(kv.layers):
                pages = torch.zeros(40, 16, 2, 512, dtype=torch.bfloat16, device=device)
                flat = pages.view(torch.uint8).view(40, -1)
                flat[torch.from_numpy(slots).to(device)] = torch.from_numpy(kv.bytes_of(keys, layer)).to(device)
                turn.write_layer(layer, pages, slots)
            turn.commit()
        assert turn.parts[0].segment.medium.name.lower() == home
        target = [torch.zeros(40, 16, 2, 512, dtype=torch.bfloat16, device=device) for _ in range(kv.layers)]
        with kv.space.lookup(keys) as hit:
            restore = hit.restore(target, slots)
            for layer in range(kv.layers):
                restore.wait_layer(layer)
        for layer, pages in enumerate(target):
            back = pages.view(torch.uint8).view(40, -1).cpu().numpy()[slots]
            assert np.array_equal(back, kv.bytes_of(keys, layer)), f"layer {layer}"
        if device == "cuda" and home == "ssd" and gds_available() is None:
            assert any(name.startswith("files to cuda") for name in client.stats().movers), "GDS was there and not used"
