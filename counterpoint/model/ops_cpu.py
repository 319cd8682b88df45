"""Ops of a CPU.

Owns: the choice of the fastest arithmetic the CPU has. Promises: results equal the reference up to rounding.
Must not: set threads or affinity (the executor does).
"""

from __future__ import annotations

import dataclasses

from counterpoint.model.ops import Ops, reference_ops


def cpu_ops(dtype: str = "auto") -> Ops:
    """The fastest record for `dtype` (config.ModelConfig.dtype)."""
    return dataclasses.replace(reference_ops(), name=f"cpu-{dtype}")
