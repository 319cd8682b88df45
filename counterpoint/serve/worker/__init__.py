"""Engines in processes of their own: one, or the workers of a pool. Both ends of the wire."""
