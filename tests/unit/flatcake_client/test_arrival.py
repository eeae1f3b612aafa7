"""A restore beside its engine: layers are told as they land, failures at once, and nothing runs on after the end."""

from __future__ import annotations

import threading

import pytest

from flatcake_client.arrival import Arrival
from flatcake_transport.errors import Unavailable

WAIT_S = 10


class Layers:
    """A restore whose layers land when they are let."""

    def __init__(self, layers: int) -> None:
        self.let = [threading.Event() for _ in range(layers)]
        self.begun = [threading.Event() for _ in range(layers)]
        self.closed = threading.Event()
        self.fails = -1

    def wait_layer(self, layer: int) -> None:
        self.begun[layer].set()
        while not self.let[layer].wait(0.001):
            if self.closed.is_set():
                raise Unavailable("closed")
        if layer == self.fails:
            raise Unavailable(f"layer {layer}")

    def close(self) -> None:
        self.closed.set()


def test_layers_are_told_as_they_land_and_brought_without_being_waited_for() -> None:
    layers = Layers(3)
    with Arrival(layers, 3) as arrival:
        layers.let[0].set()
        arrival.wait_layer(0)
        assert layers.begun[1].wait(WAIT_S), "layer 1 is brought while the engine computes on layer 0"
        assert not layers.begun[2].is_set()
        assert arrival.brought_s == 0, "not the end yet"
        layers.let[1].set()
        layers.let[2].set()
        assert arrival.failure() is None
        arrival.wait_layer(2)
        arrival.wait_layer(0)
        assert arrival.brought_s > 0
    assert layers.closed.is_set()


def test_a_failure_is_heard_by_who_waits_and_who_asks_later() -> None:
    layers = Layers(3)
    layers.fails = 1
    with Arrival(layers, 3) as arrival:
        heard: list[Exception] = []

        def wait() -> None:
            try:
                arrival.wait_layer(2)
            except Unavailable as error:
                heard.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        layers.let[0].set()
        arrival.wait_layer(0)
        layers.let[1].set()
        thread.join(WAIT_S)
        assert [str(error) for error in heard] == ["layer 1"]
        assert str(arrival.failure()) == "layer 1"
        with pytest.raises(Unavailable):
            arrival.wait_layer(0)  # in place, but of no use any more
        assert not layers.begun[2].is_set()


def test_the_end_comes_before_the_last_layer() -> None:
    layers = Layers(3)
    with Arrival(layers, 3) as arrival:
        assert layers.begun[0].wait(WAIT_S)
    assert not layers.begun[1].is_set()
    assert isinstance(arrival.failure(), Unavailable)
    arrival.close()
