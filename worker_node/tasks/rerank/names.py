"""Names of the graph's ports beside those of every encoder."""

TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)
LOGITS = "logits"
