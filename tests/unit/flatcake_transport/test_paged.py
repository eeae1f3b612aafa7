from __future__ import annotations

import numpy as np
import pytest

from flatcake_transport.mover import PagedSpan
from flatcake_transport.paged import byte_rows, check_span, contiguous_bytes, gather, host_array, on_device, scatter


def span(pages: object, slots: list[int], plane_bytes: int) -> PagedSpan:
    return PagedSpan(pages, np.array(slots, np.int64), plane_bytes)


def test_k_and_v_apart_are_two_parts_of_wide_words() -> None:
    cache = np.zeros((2, 10, 16, 8, 128), np.float16)  # K and V, slots, tokens, heads, dim
    rows = byte_rows(cache.transpose(1, 0, 2, 3, 4))
    assert rows.shape == (10, 2, 16 * 8 * 128 * 2 // 8)
    assert rows.dtype == np.uint64
    assert np.shares_memory(rows, cache)


def test_heads_before_tokens() -> None:
    cache = np.arange(3 * 2 * 4 * 5, dtype=np.int16).reshape(3, 2, 4, 5)  # slots, heads, tokens, dim
    pages = cache.transpose(0, 2, 1, 3)  # the engine calls it slots, tokens, heads, dim
    out = np.zeros(80, np.uint8)
    gather(span(pages, [2], 80), out)
    assert np.array_equal(out.view(np.int16).reshape(4, 2, 5), pages[2])


def test_slots_that_do_not_exist_touch_nothing() -> None:
    pages = np.zeros((4, 8), np.uint8)
    for slots in ([4], [-1], [0, 0], [1, 2, 1]):
        with pytest.raises(ValueError, match="slot"):
            scatter(np.ones(8 * len(slots), np.uint8), span(pages, slots, 8))
    assert not pages.any()


@pytest.mark.parametrize(
    ("pages", "slots", "plane_bytes"),
    [
        (np.zeros((4, 8), np.uint8), np.array([0.0]), 8),
        (np.zeros((4, 8), np.uint8), np.array([[0]]), 8),
        (np.zeros((4, 8), np.uint8), np.array([0], np.int32), 8),
        (np.zeros((4, 8), np.uint16), np.array([0]), 8),
        (np.zeros(()), np.array([0]), 8),
    ],
)
def test_what_is_no_paged_span(pages: np.ndarray, slots: np.ndarray, plane_bytes: int) -> None:
    with pytest.raises(ValueError):
        check_span(PagedSpan(pages, slots, plane_bytes))


def test_sizes_must_agree() -> None:
    pages = np.zeros((4, 8), np.uint8)
    with pytest.raises(ValueError, match="9 bytes"):
        scatter(np.ones(9, np.uint8), span(pages, [0], 8))
    with pytest.raises(ValueError, match="7 bytes"):
        gather(span(pages, [0], 8), np.ones(7, np.uint8))


@pytest.mark.parametrize(
    "data", [np.zeros(4, np.uint16), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], [1, 2], b"12"]
)
def test_a_memory_span_is_contiguous_bytes(data: object) -> None:
    with pytest.raises(ValueError):
        contiguous_bytes(data)


def test_floats_torch_has_and_numpy_lacks() -> None:
    torch = pytest.importorskip("torch", reason="tensors were not tested")
    tensor = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    assert host_array(tensor).dtype == np.int16
    assert not on_device(tensor)
    with pytest.raises(ValueError, match="complex128"):
        host_array(torch.ones(2, dtype=torch.complex128))
