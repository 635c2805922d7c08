"""Models at run time, and pulls: /models (spec: models)."""
