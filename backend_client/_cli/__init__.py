"""`npu-client` on the command line."""
