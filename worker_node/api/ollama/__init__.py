"""The Ollama-compatible dialect under /api (spec: dialects)."""

# The version of Ollama's API that this dialect follows. Tools compare it to know what they may ask for.
OLLAMA_API_VERSION = "0.12.6"
