"""The messages between client and node: requests, replies, errors. The only I/O is that of `transport`."""
