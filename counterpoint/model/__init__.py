"""The decoder: weights, KV pages, operators and sampling of one forward pass, in torch."""

from counterpoint.model.batch import PassSegments, PassTensors, make_batch
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool, page_bytes
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.ops_cpu import cpu_ops
from counterpoint.model.weights import load_decoder

__all__ = [
    "Decoder",
    "KVPool",
    "Ops",
    "PassSegments",
    "PassTensors",
    "cpu_ops",
    "load_decoder",
    "make_batch",
    "page_bytes",
    "reference_ops",
]
