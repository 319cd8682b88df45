"""Splits a model's output into reasoning, content and tool calls; renders tools into prompts."""
