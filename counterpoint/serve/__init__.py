"""Talks to clients: text in and out, HTTP, and the wire to the engine's process."""
