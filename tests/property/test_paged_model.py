"""Scatter and gather beside the naive rule: `pages[slots[i]]` flattened is block i, for any strides and kind of item."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.mover import PagedSpan
from flatcake_transport.paged import gather, gather_tensor, prepared, scatter, scatter_tensor

torch = pytest.importorskip("torch", reason="paged tensors were not tested")

KINDS = [np.uint8, np.int16, np.float16, np.float32, np.uint64, np.float64]
TORCH_KINDS = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float8_e4m3fn]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[slice]]:
    """A shape, an order in which its axes lie in memory, and a cut of the memory that makes strides odd."""
    shape = [draw(st.integers(1, 6)), *draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))]
    order = draw(st.permutations(range(len(shape))))
    cuts = [draw(st.sampled_from([slice(None), slice(1, None), slice(None, -1), slice(None, None, 2)])) for _ in shape]
    return shape, order, cuts


def strided(shape: list[int], order: list[int], cuts: list[slice], zeros):
    """An array of `shape` whose axes lie in memory as `order` says, with room around that is not part of it."""
    room = [
        (n * 2 if cut.step == 2 else n + 1 if cut != slice(None) else n) for n, cut in zip(shape, cuts, strict=True)
    ]
    memory = zeros([room[axis] for axis in order])
    back = [order.index(axis) for axis in range(len(shape))]
    turned = memory.transpose(back) if isinstance(memory, np.ndarray) else memory.permute(back)
    return memory, turned[tuple(cuts)]


def drawn_slots(data: st.DataObject, slots: int) -> np.ndarray:
    order = data.draw(st.permutations(range(slots)))
    return np.array(order[: data.draw(st.integers(0, slots))], np.int64)


@given(layouts(), st.sampled_from(KINDS), st.data())
def test_numpy_against_the_naive_rule(layout, kind, data: st.DataObject) -> None:
    shape, order, cuts = layout
    memory, pages = strided(shape, order, cuts, lambda s: np.zeros(s, kind))
    assert list(pages.shape) == shape
    fill = np.random.default_rng(0).integers(0, 256, memory.nbytes, dtype=np.uint8)
    memory.reshape(-1).view(np.uint8)[:] = fill
    slots = drawn_slots(data, shape[0])
    plane_bytes = int(np.prod(shape[1:])) * pages.itemsize
    skew = data.draw(st.integers(0, 3))
    block_bytes = np.random.default_rng(1).integers(0, 256, len(slots) * plane_bytes + skew, dtype=np.uint8)[skew:]
    expected_memory = memory.copy()
    _, expected = strided(shape, order, cuts, lambda _: expected_memory)
    for i, slot in enumerate(slots.tolist()):
        block = block_bytes[i * plane_bytes : (i + 1) * plane_bytes]
        expected[slot] = block.copy().view(kind).reshape(shape[1:])
    span = PagedSpan(pages, slots, plane_bytes)
    cut = data.draw(st.integers(0, len(slots)))
    for first, end in ((0, cut), (cut, len(slots))):
        scatter(block_bytes[first * plane_bytes : end * plane_bytes], prepared(span).part(first, end))
    assert memory.tobytes() == expected_memory.tobytes(), "the named slots and nothing else"
    out = np.zeros(len(block_bytes) + skew, np.uint8)[skew:]
    gather(span, out)
    assert np.array_equal(out, block_bytes)


@given(layouts(), st.sampled_from(TORCH_KINDS), st.booleans(), st.data())
def test_torch_against_the_naive_rule(layout, kind, on_tensors: bool, data: st.DataObject) -> None:
    """`on_tensors`: the code that runs on a GPU, here on CPU tensors."""
    shape, order, cuts = layout
    memory, pages = strided(shape, order, cuts, lambda s: torch.zeros(s, dtype=kind))
    fill = np.random.default_rng(0).integers(0, 256, memory.nbytes, dtype=np.uint8)
    memory.view(-1).view(torch.uint8)[:] = torch.from_numpy(fill)
    slots = drawn_slots(data, shape[0])
    plane_bytes = int(np.prod(shape[1:])) * kind.itemsize
    skew = data.draw(st.integers(0, 3))
    block_bytes = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, len(slots) * plane_bytes + skew, dtype=np.uint8)
    )[skew:]
    expected_memory = memory.clone()
    _, expected = strided(shape, order, cuts, lambda _: expected_memory)
    for i, slot in enumerate(slots.tolist()):
        block = block_bytes[i * plane_bytes : (i + 1) * plane_bytes].clone()
        expected[slot] = block.view(kind).view(shape[1:])
    out = torch.zeros(len(block_bytes) + skew, dtype=torch.uint8)[skew:]
    if on_tensors:
        scatter_tensor(block_bytes, pages, torch.from_numpy(slots))
        gather_tensor(pages, torch.from_numpy(slots), out)
    else:
        scatter(block_bytes, PagedSpan(pages, slots, plane_bytes))
        gather(PagedSpan(pages, slots, plane_bytes), out)
    assert torch.equal(memory.view(-1).view(torch.uint8), expected_memory.view(-1).view(torch.uint8))
    assert torch.equal(out, block_bytes)
