"""Structured output: from a request's schema, pattern or grammar to a checked grammar."""
