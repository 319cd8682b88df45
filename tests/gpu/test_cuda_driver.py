"""PinnedSlabs: pinned memory cut from slabs."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterpoint.device.cuda.driver import PinnedSlabs


class Small(PinnedSlabs):
    SLAB_BYTES = 4096


def made() -> tuple[Small, list[Tensor]]:
    got: list[Tensor] = []

    def get(size: int) -> Tensor:
        got.append(torch.zeros(size, dtype=torch.uint8))
        return got[-1]

    return Small(get), got


@given(
    st.lists(
        st.tuples(st.sampled_from(["cut", "borrow", "give back"]), st.integers(1, 6000)),
        max_size=60,
    )
)
def test_allocated_blocks_never_overlap(asked):
    slabs, _ = made()
    held: list[tuple[Tensor, bool]] = []  # and whether it is borrowed
    for number, (what, size) in enumerate(asked):
        if what == "give back":
            if held and held[size % len(held)][1]:
                slabs.free(held.pop(size % len(held))[0])
            continue
        block = slabs.alloc_permanent(size) if what == "cut" else slabs.alloc(size)
        assert len(block) >= size and block.data_ptr() % 256 == held_offset(block)
        block.fill_(number % 251 + 1)
        held.append((block, what == "borrow"))
        spans = sorted((b.data_ptr(), b.data_ptr() + len(b)) for b, _ in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def held_offset(block: Tensor) -> int:
    """The slab's own offset within 256 bytes; pinned memory starts at a page."""
    return block.untyped_storage().data_ptr() % 256


def test_freed_blocks_are_reused():
    slabs, got = made()
    for _ in range(100):
        blocks = [slabs.alloc(size) for size in (1, 300, 1000)]
        for block in blocks:
            slabs.free(block)
    assert len(got) == 1, "three blocks of 256, 512 and 1,024 bytes fit one slab of 4,096"


def test_a_large_block_gets_its_own_slab():
    slabs, got = made()
    assert len(slabs.alloc_permanent(10_000)) == 10_240 and [len(piece) for piece in got] == [
        4096,
        10_240,
    ]


def test_slabs_are_writable_in_and_outside_inference_mode():
    slabs, _ = made()
    with torch.inference_mode():
        slabs.alloc_permanent(4000)
        inside = slabs.alloc_permanent(1000)
    inside.fill_(1)
    slabs.alloc(1000).fill_(2)
    with torch.inference_mode():
        inside.fill_(3)
