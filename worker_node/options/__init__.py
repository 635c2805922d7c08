"""How a part of the node declares the options that a model may set for it in node.toml."""
