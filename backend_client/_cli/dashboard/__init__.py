"""The dashboard of a whole fleet, on loopback; the nodes serve the very same page for themselves."""
