"""Pages for people with a browser: what the node is, and its API. They show nothing of this node's models or work."""
