import worker_node  # noqa: F401  (turns OpenVINO's telemetry off, before a test imports OpenVINO)
