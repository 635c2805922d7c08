"""The clients: what their methods are called, and what they take and return."""
