"""The engine: events in, commands and outputs out. No clock, no tensor, no waiting."""
