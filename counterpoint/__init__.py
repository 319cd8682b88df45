"""Counterpoint: an LLM serving engine in which prefill and decode run side by side."""

__version__ = "0.1.0"
