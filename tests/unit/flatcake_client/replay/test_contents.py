from __future__ import annotations

import numpy as np
import pytest

from flatcake_client.replay.contents import Contents
from flatcake_client.replay.workload import block_keys

KEYS = block_keys(np.arange(6))
SLOTS = np.array([5, 0, 3, 7, 1, 2])


@pytest.fixture
def filled():
    contents, pages = Contents(4, 128, body_every=1), np.zeros((8, 4, 128), np.uint8)
    contents.fill(pages, SLOTS, KEYS)
    return contents, pages


def test_what_was_filled_is_right_and_noisy(filled):
    contents, pages = filled
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 0
    assert len(np.unique(pages[SLOTS].reshape(24, 128), axis=0)) == 24
    assert not pages[[4, 6]].any()


@pytest.mark.parametrize("place", [(0, 0), (1, 127), (2, 16), (3, 64), (3, 111)])
def test_one_flipped_byte_anywhere_is_one_wrong_block(filled, place):
    contents, pages = filled
    pages[3][place] ^= 1
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 1


def test_swapped_planes_and_blocks_are_wrong(filled):
    contents, pages = filled
    pages[5, [0, 1]] = pages[5, [1, 0]]
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 1
    pages[[0, 3]] = pages[[3, 0]]
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 3


def test_a_wiped_slot_holds_no_block(filled):
    contents, pages = filled
    contents.wipe(pages, SLOTS[:2])
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 2


def test_stamps_are_compared_for_all_and_bodies_for_some():
    contents, pages = Contents(1, 64, body_every=256), np.zeros((8, 1, 64), np.uint8)
    contents.fill(pages, SLOTS, KEYS)
    pages[:, :, 30] ^= 1
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == int((KEYS[:, 1] == 0).sum())
    pages[:, :, 3] ^= 1
    assert contents.wrong_blocks(pages, SLOTS, KEYS) == 6


@pytest.mark.parametrize("plane_bytes", [32, 100])
def test_planes_that_hold_no_stamps_are_refused(plane_bytes):
    with pytest.raises(ValueError, match="multiple of 8"):
        Contents(1, plane_bytes)
