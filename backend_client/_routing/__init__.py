"""One call over the fleet and the cloud: attempts, retries, fallback."""
