"""Scatter to and gather from an engine's paged KV: some slots of one layer <-> contiguous bytes.

Bytes are reinterpreted, never converted: pages and data are both seen as the widest integers that divide what is
contiguous, so that one indexed assignment copies whole rows (numpy) or one index kernel runs (torch, CUDA). For
`pages[slot]` with several strided parts, e.g. K and V in two halves of one allocation, the parts become axes of the view.

    pages (slots, 2, tokens, heads, dim) bf16, K and V apart    ->  rows (slots, 2, tokens*heads*dim/4) u64
    data  (n * plane_bytes,) u8                                 ->       (n,     2, tokens*heads*dim/4) u64

Host tensors of torch are seen as numpy arrays over the same memory, so there is one host path. numpy lets go of the GIL in
all three copies used here (slice, indexed assignment, take): several threads copy at once. Measured here, 512 MiB in rows
of 256 KiB to shuffled slots: 0.98-1.05 of one memcpy.

Invariant: nothing outside the named slots is touched; a wrong shape or slot is a ValueError before the first byte.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.mover import PagedSpan, Slots

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
_WORDS: Final = (8, 4, 2, 1)


def is_tensor(array: object) -> bool:
    """Whether this is a torch tensor, without importing torch: who has no torch has no tensors."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(array, torch_module.Tensor)


def on_device(array: object) -> bool:
    """Whether the bytes are in an accelerator's memory."""
    return is_tensor(array) and cast("torch.Tensor", array).device.type != "cpu"


def device_of(array: object) -> str:
    """Where the bytes of an array are: "cpu", or e.g. "cuda:0"."""
    return str(cast("torch.Tensor", array).device) if is_tensor(array) else "cpu"


def host_array(array: Any) -> NDArray[Any]:
    """A numpy array over the same host memory; floats that numpy lacks (bfloat16) become integers of the same size.

    Raises: ValueError: not a numpy array or host tensor.
    """
    if isinstance(array, np.ndarray):
        return array
    if not is_tensor(array) or on_device(array):
        raise ValueError(f"expected host memory, a numpy array or a CPU tensor, not {type(array).__name__}")
    import torch

    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    if array.dtype.itemsize not in words:
        raise ValueError(f"pages of {array.dtype} are not taken: items of 1, 2, 4 or 8 bytes expected")
    host: NDArray[Any] = array.detach().view(words[array.dtype.itemsize]).numpy()
    return host


def contiguous_bytes(array: Any) -> Bytes:
    """The host bytes of a span as 1-d uint8. Raises: ValueError: not 1-d contiguous bytes."""
    host = host_array(array)
    if host.dtype.itemsize != 1 or host.ndim != 1 or not host.flags.c_contiguous:
        raise ValueError("a memory span is contiguous 1-d uint8")
    return host.view(np.uint8)


def check_span(span: PagedSpan) -> None:
    """Raises: ValueError: pages and plane_bytes disagree, or a slot does not exist or is named twice."""
    pages, slots = span.pages, span.slots
    if len(pages.shape) < 1 or not (isinstance(pages, np.ndarray) or is_tensor(pages)):
        raise ValueError("pages are a numpy array or a torch tensor whose first axis is the slot")
    row_bytes = math.prod(pages.shape[1:]) * pages.dtype.itemsize
    if row_bytes != span.plane_bytes:
        raise ValueError(f"a slot of pages shaped {tuple(pages.shape)} has {row_bytes} bytes, not {span.plane_bytes}")
    if slots.ndim != 1 or slots.dtype != np.int64:
        raise ValueError("slots are a 1-d int64 array")
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= pages.shape[0]):
        raise ValueError(f"slots reach from {slots.min()} to {slots.max()}: the pages have {pages.shape[0]}")
    if len(slots) > 1 and not (slots[1:] > slots[:-1]).all():
        # Every copy comes through here, and np.unique takes 20 times as long: it hashes.
        ordered = np.sort(slots)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a slot is named twice")


def prepared(span: PagedSpan) -> PagedSpan:
    """The span for many moves of its parts: checked here, once, and pages on the host seen as rows.

    Raises: ValueError: see `check_span`.
    """
    check_span(span)
    if on_device(span.pages):
        return span
    return PagedSpan(span.pages, span.slots, span.plane_bytes, byte_rows(host_array(span.pages)))


def byte_rows(pages: NDArray[Any]) -> NDArray[Any]:
    """Pages as (slots, strided parts.., contiguous words): a view, with the widest words its strides and sizes allow."""
    size, shape, strides = pages.dtype.itemsize, list(pages.shape[1:]), list(pages.strides[1:])
    chunk = size
    while shape and (strides[-1] == chunk or shape[-1] == 1):
        chunk *= shape.pop()
        strides.pop()
    word = math.gcd(_WORDS[0], chunk, pages.strides[0], *strides, pages.ctypes.data)
    if pages.ndim == len(shape) + 2 and (
        chunk > size or word == size
    ):  # the last axis alone is contiguous: no other view is needed
        return pages.view(f"u{word}")
    rows: NDArray[Any] = np.lib.stride_tricks.as_strided(
        pages.view(f"V{size}"), (pages.shape[0], *shape, chunk // size), (pages.strides[0], *strides, size)
    )
    if chunk == size and word != size:
        # Items are scattered one by one: the items themselves are the words.
        return rows.view(f"u{size}") if size in _WORDS else rows
    return rows.view(f"u{word}")


def _consecutive(slots: Slots) -> bool:
    if len(slots) < 3:
        return len(slots) == 1 or (len(slots) == 2 and slots[1] - slots[0] == 1)
    return int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((slots[1:] - slots[:-1] == 1).all())


class HostCopy:
    """A span and its contiguous bytes on the host, both seen as rows of one word: worked out once, copied in parts.

    Parts are blocks `first .. end` of the span; several threads may copy different ones at once, without the GIL.
    Span and data were checked before (`check_span`, sizes).
    """

    __slots__ = ("_consecutive", "_plain", "_rows", "_slots", "_words")

    def __init__(self, span: PagedSpan, data: Bytes) -> None:
        self._slots = span.slots
        self._rows = byte_rows(host_array(span.pages)) if span.rows is None else span.rows
        self._words = data.view(self._rows.dtype).reshape(len(span.slots), *self._rows.shape[1:])
        self._consecutive = _consecutive(span.slots)
        self._plain = self._rows.flags.c_contiguous and self._rows.flags.aligned

    def scatter(self, first: int, end: int) -> None:
        """Copy these blocks from the data into the slots."""
        if self._consecutive:
            start = int(self._slots[0])
            self._rows[start + first : start + end] = self._words[first:end]
        else:
            self._rows[self._slots[first:end]] = self._words[first:end]

    def gather(self, first: int, end: int) -> None:
        """Copy these blocks from the slots into the data."""
        words, slots = self._words[first:end], self._slots[first:end]
        if self._consecutive:
            start = int(self._slots[0])
            words[...] = self._rows[start + first : start + end]
        elif not self._plain:
            words[...] = self._rows[slots]  # np.take would first copy all pages to make them contiguous
        else:
            # mode="clip" lets numpy write straight into `out`; the slots were checked, so nothing is ever clipped.
            np.take(self._rows, slots, axis=0, out=words, mode="clip")


def scatter(data: Any, span: PagedSpan) -> None:
    """Copy contiguous host bytes into the span's slots on the host. Block i is `data[i * plane_bytes : ...]`.

    The caller's thread does the copy. Raises: ValueError: sizes, slots or kinds are wrong.
    """
    copy = _checked_copy(span, data)
    copy.scatter(0, len(span.slots))


def gather(span: PagedSpan, data: Any) -> None:
    """Copy the span's slots into contiguous host bytes: the inverse of `scatter`, with the same errors."""
    copy = _checked_copy(span, data)
    copy.gather(0, len(span.slots))


def _checked_copy(span: PagedSpan, data: Any) -> HostCopy:
    check_span(span)
    host = contiguous_bytes(data)
    if len(host) != span.size_bytes:
        raise ValueError(f"{len(host)} bytes for {len(span.slots)} blocks of {span.plane_bytes}")
    return HostCopy(span, host)


def _tensor_rows(pages: torch.Tensor, data_offset: int) -> torch.Tensor:
    """`byte_rows` of a tensor: (slots, strided parts.., contiguous words), a view, words as wide as offsets allow, too."""
    import torch

    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = pages.dtype.itemsize
    if size not in kinds:
        raise ValueError(f"pages of {pages.dtype} are not taken: items of 1, 2, 4 or 8 bytes expected")
    items = pages.detach().view(kinds[size])
    shape, strides = list(items.shape[1:]), list(items.stride()[1:])
    chunk = 1
    while shape and (strides[-1] == chunk or shape[-1] == 1):
        chunk *= shape.pop()
        strides.pop()
    steps = (items.stride(0), *strides)
    rows = items.as_strided((len(items), *shape, chunk), (*steps, 1), items.storage_offset())
    offsets = (data_offset, *(n * size for n in (chunk, items.storage_offset(), *steps)))
    return rows.view(kinds[next(w for w in _WORDS if w == size or all(n % w == 0 for n in offsets))])


def _aligned(data: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the bytes can be viewed as the rows' items: torch wants aligned offsets, odd planes have others."""
    return int(data.storage_offset()) % rows.dtype.itemsize == 0


def scatter_tensor(data: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatter on the tensors' own device, in the current stream: one index_copy_ kernel. All three are on that device."""
    if len(slots):
        rows = _tensor_rows(pages, int(data.storage_offset()))
        source = data if _aligned(data, rows) else data.clone()
        rows.index_copy_(0, slots, source.view(rows.dtype).view(len(slots), *rows.shape[1:]))


def gather_tensor(pages: torch.Tensor, slots: torch.Tensor, data: torch.Tensor) -> None:
    """Gather on the tensors' own device, in the current stream: one index_select kernel."""
    import torch

    if len(slots):
        rows = _tensor_rows(pages, int(data.storage_offset()))
        if _aligned(data, rows):
            torch.index_select(rows, 0, slots, out=data.view(rows.dtype).view(len(slots), *rows.shape[1:]))
        else:
            data.copy_(torch.index_select(rows, 0, slots).flatten().view(torch.uint8))
