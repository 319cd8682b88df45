"""The decoder: weights, KV pages and the arithmetic of one forward pass. torch lives here and in the devices."""

from counterpoint.model.batch import PassTensors, make_batch
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool, page_bytes
from counterpoint.model.ops import Ops, reference_ops
from counterpoint.model.ops_cpu import cpu_ops
from counterpoint.model.weights import load_decoder

__all__ = [
    "PassTensors",
    "Decoder",
    "KVPool",
    "Ops",
    "cpu_ops",
    "load_decoder",
    "make_batch",
    "page_bytes",
    "reference_ops",
]
