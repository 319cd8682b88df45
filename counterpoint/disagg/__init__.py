"""The room that joins workers: the handoff of a request's KV between two of them, the router, elastic roles."""
