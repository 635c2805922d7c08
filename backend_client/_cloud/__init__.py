"""The OpenAI-compatible fallback, through the OpenAI SDK."""
