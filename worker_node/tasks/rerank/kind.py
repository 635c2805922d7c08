"""The kind of the models."""

RERANK = "rerank"
