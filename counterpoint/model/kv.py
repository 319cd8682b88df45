"""KVPool: the keys and values of every token the device remembers, in pages.

Owns: the two tensors of each layer, in one allocation. Promises: page p, offset o of a layer is row `p * page_tokens + o` of its
flat view; the pool starts as zeros, so that a masked read of a page never written is harmless.
Must not: know which request owns a page (the core does).

Shapes: R flat rows (pages * page_tokens), K KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from counterpoint.spec import ModelSpec


class KVPool:
    """`k[layer]` and `v[layer]` are [pages, page_tokens, kv_heads, head_dim], contiguous, or with `by_head` a view of memory in
    which each head of a page is one piece. `bytes` is the size of all of them. `whole` [layers, K or V, pages, …] is the
    allocation, None where `storage` was given."""

    __slots__ = ("bytes", "k", "page_tokens", "pages", "v", "whole")

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        by_head: bool = False,
        storage: Sequence[np.ndarray] | None = None,
    ) -> None:
        """`storage`: zeroed uint8 arrays to live in (K and V of layer 0, of layer 1, …) instead of memory of its own, as processes
        that share a pool need. Raises ValueError if `pages` or `page_tokens` is not positive or the storage does not fit;
        torch's own error if memory is short."""
        if pages < 1 or page_tokens < 1:
            raise ValueError(
                f"a KV pool needs pages and page_tokens of 1 or more, not {pages} and {page_tokens}"
            )
        inner = (spec.kv_heads, page_tokens) if by_head else (page_tokens, spec.kv_heads)
        shape = (pages, *inner, spec.head_dim)
        self.pages = pages
        self.page_tokens = page_tokens
        self.whole: torch.Tensor | None = None
        if storage is None:
            self.whole = zeros((spec.layers, 2, *shape), dtype, torch.device(device))
            k, v = self.whole[:, 0].unbind(0), self.whole[:, 1].unbind(0)
        else:
            layers = [array_view(array, shape, dtype) for array in storage]
            k, v = tuple(layers[0::2]), tuple(layers[1::2])
        self.k: tuple[torch.Tensor, ...] = (
            tuple(layer.transpose(1, 2) for layer in k) if by_head else k
        )
        self.v: tuple[torch.Tensor, ...] = (
            tuple(layer.transpose(1, 2) for layer in v) if by_head else v
        )
        self.bytes = pages * page_bytes(spec, page_tokens, dtype)

    def release(self) -> None:
        """Give the memory back, also if someone still holds this object."""
        self.k = self.v = ()
        self.whole = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that, on a CPU, take memory only where they are written: the system hands out zero pages at first touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


def array_view(array: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the memory of `array`. Raises ValueError if it has another size."""
    wanted = math.prod(shape) * dtype.itemsize
    if array.nbytes != wanted:
        raise ValueError(f"storage of {array.nbytes} bytes for a layer of {wanted}")
    return torch.from_numpy(array).view(dtype).view(shape)


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers: what a pool of a given memory is divided by."""
    return page_tokens * spec.kv_bytes_per_token(dtype.itemsize)
