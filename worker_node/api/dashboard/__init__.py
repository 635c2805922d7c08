"""The built-in dashboard: a page, the state that it fetches every second, and the history in that state."""
