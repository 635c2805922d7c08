"""The built-in dashboard: a page, the state that it asks for every second, and the history that the state tells."""
