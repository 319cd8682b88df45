"""The room that decides. No clock, no tensor, no wait: events in, commands and outputs out."""
