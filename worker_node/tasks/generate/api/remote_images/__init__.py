"""Images that requests name by URL, fetched from the hosts that the settings name."""
