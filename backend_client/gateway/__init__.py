"""`npu-gateway`: the client's routing, fallback and limits for services in every language, over HTTP."""
