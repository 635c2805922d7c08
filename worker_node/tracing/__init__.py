"""Spans of what a node does for a request, in the caller's trace. Off unless the settings say otherwise."""
