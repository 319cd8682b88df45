"""Disaggregated serving: KV handoff between workers, routing, and role changes."""
