"""`npu-node certify`: proof of a model on the hardware at hand, and the report of it."""
