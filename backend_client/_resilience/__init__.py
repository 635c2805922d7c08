"""One deadline, one retry budget, one loop that retries."""
