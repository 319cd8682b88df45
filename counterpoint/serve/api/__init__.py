"""HTTP APIs: OpenAI chat, completions and responses, Anthropic messages."""
