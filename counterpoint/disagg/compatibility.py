"""Digest: what two workers must have in common before KV may pass between them.

Owns: the list of those things. Promises: a refusal names the first field that differs and both values.
Must not: compare what may differ (tensor parallelism: kv_transfer/head_mapping.py; the size of the pool; the policy).
"""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec

from counterpoint.disagg.messages import VERSION
from counterpoint.spec import ModelSpec


class CompatibilityDigest(msgspec.Struct, frozen=True, kw_only=True):
    """`weights` names the very checkpoint (a hash of its files, or a seed for dummy weights): KV of other weights is garbage of
    the right shape. `layout` is the order of a page's axes. `rope` and `model` are hashes of the fields that K depends on."""

    protocol: int = VERSION
    model: str
    weights: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    page_tokens: int
    layout: str
    rope: str
    eos_token_ids: tuple[int, ...]


def make_digest(
    spec: ModelSpec, weights: str, kv_dtype: str, page_tokens: int, layout: str = "token, head, dim"
) -> CompatibilityDigest:
    """The digest of a worker that runs `spec` with the checkpoint called `weights`."""
    shape = {
        f.name: getattr(spec, f.name)
        for f in dataclasses.fields(spec)
        if f.name not in ("name", "max_context_tokens")
    }
    return CompatibilityDigest(
        model=_hash(shape),
        weights=weights,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=kv_dtype,
        page_tokens=page_tokens,
        layout=layout,
        rope=_hash(dataclasses.asdict(spec.rope)),
        eos_token_ids=spec.eos_token_ids,
    )


def find_mismatch(ours: CompatibilityDigest, theirs: CompatibilityDigest) -> str:
    """Why no KV may pass between the two, or "" if it may."""
    mine, other = msgspec.structs.asdict(ours), msgspec.structs.asdict(theirs)
    for field in sorted(mine, key="model".__eq__):  # the hash of everything last: it says least
        if mine[field] != other[field]:
            return f"{field} differs: {mine[field]!r} here, {other[field]!r} there"
    return ""


def _hash(fields: dict[str, object]) -> str:
    text = repr(sorted(fields.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
