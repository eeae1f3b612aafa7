"""FlatCake, as an engine embeds it. See `connect`.

client = connect("unix:///run/flatcake/flatcake.sock")
space = client.open_space(model="llama-3.1-8b", dtype="bfloat16", block_tokens=64, plane_bytes=[...])
keys = space.keys(token_ids)
with space.lookup(keys) as hit:
    restore = hit.restore(target, slots)
    for layer in range(layers):
        restore.wait_layer(layer)
with space.begin_turn(keys, session="agent-42") as turn:
    for layer in range(layers):
        turn.write_layer(layer, source, slots)
    turn.commit()
"""

from flatcake_client.client import Client, ClientStats, connect
from flatcake_client.hit import Hit
from flatcake_client.records import Part, Run
from flatcake_client.restore import Restore, RestoreCorrupt, RestoreStats, RestoreUnavailable
from flatcake_client.space import Space
from flatcake_client.writer import Turn
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Corrupt, FlatCakeError, Overloaded, Unavailable

__all__ = [
    "Address",
    "Client",
    "ClientStats",
    "Corrupt",
    "FlatCakeError",
    "Hit",
    "Medium",
    "Overloaded",
    "Part",
    "Restore",
    "RestoreCorrupt",
    "RestoreStats",
    "RestoreUnavailable",
    "Run",
    "Space",
    "Turn",
    "Unavailable",
    "connect",
]
