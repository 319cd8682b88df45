"""The HTTP APIs: OpenAI chat, completions and responses, Anthropic messages; their limits and streams."""
