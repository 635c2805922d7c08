"""Administration of the running node: /admin."""
