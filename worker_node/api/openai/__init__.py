"""The OpenAI-compatible dialect under /v1 (spec: dialects)."""
