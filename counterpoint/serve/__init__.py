"""Serving: HTTP APIs, text in and out, the engines' processes, and use without a server."""
