"""The engine without a server: the `LLM` class, batch files, the terminal chat."""
