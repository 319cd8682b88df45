"""What a model and a device are, as numbers: no torch, no weights, no driver."""

from counterpoint.spec.model import ModelError, ModelSpec, RopeSpec

__all__ = ["ModelError", "ModelSpec", "RopeSpec"]
