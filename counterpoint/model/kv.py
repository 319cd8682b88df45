"""KVPool: the KV cache of a device, in pages.

Owns: a K and a V tensor per layer. Page p, offset o of a layer is row `p * page_tokens + o` of its
flat view. The pool starts as zeros, so that a masked read of an unwritten page is harmless.
Must not: know which request owns a page (the core does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from counterpoint.spec import ModelSpec


class KVPool:
    """`k[layer]` and `v[layer]` are [pages, page_tokens, kv_heads, head_dim].

    `bytes` is the size of all of them. `buffer` [layers, K or V, pages, ...] is their allocation;
    None if the pool lives in storage of the caller.
    """

    __slots__ = ("buffer", "bytes", "k", "page_tokens", "pages", "v")

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError if `pages` or `page_tokens` is not positive, and torch's own error if
        memory is short."""
        shape = _layer_shape(spec, pages, page_tokens)
        buffer = zeros((spec.layers, 2, *shape), dtype, torch.device(device))
        self.buffer: torch.Tensor | None = buffer
        self.k: tuple[torch.Tensor, ...] = buffer[:, 0].unbind(0)
        self.v: tuple[torch.Tensor, ...] = buffer[:, 1].unbind(0)
        self.pages = pages
        self.page_tokens = page_tokens
        self.bytes = pages * page_bytes(spec, page_tokens, dtype)

    @classmethod
    def in_storage(
        cls,
        spec: ModelSpec,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        storage: Sequence[np.ndarray],
    ) -> KVPool:
        """A pool in zeroed uint8 arrays, as processes that share it need: K and V of layer 0, of
        layer 1, ... Raises ValueError as the constructor does, and if an array has another size."""
        shape = _layer_shape(spec, pages, page_tokens)
        layers = [array_view(array, shape, dtype) for array in storage]
        pool = cls.__new__(cls)
        pool.buffer = None
        pool.k, pool.v = tuple(layers[0::2]), tuple(layers[1::2])
        pool.pages = pages
        pool.page_tokens = page_tokens
        pool.bytes = pages * page_bytes(spec, page_tokens, dtype)
        return pool

    def release(self) -> None:
        """Frees the memory, even if something still refers to this object."""
        self.k = self.v = ()
        self.buffer = None


def _layer_shape(spec: ModelSpec, pages: int, page_tokens: int) -> tuple[int, ...]:
    if pages < 1 or page_tokens < 1:
        raise ValueError(
            f"a KV pool needs pages and page_tokens of 1 or more, not {pages} and {page_tokens}"
        )
    return pages, page_tokens, spec.kv_heads, spec.head_dim


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they take memory only once written: the system maps pages at first touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


def array_view(array: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the memory of `array`. Raises ValueError if it has another size."""
    expected = math.prod(shape) * dtype.itemsize
    if array.nbytes != expected:
        raise ValueError(f"storage of {array.nbytes} bytes for a layer of {expected}")
    return torch.from_numpy(array).view(dtype).view(shape)


def page_bytes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return page_tokens * spec.kv_bytes_per_token(dtype.itemsize)
