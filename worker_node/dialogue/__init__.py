"""Separates tool calls and reasoning from the answer while a model's output streams."""
