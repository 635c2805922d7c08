"""Measurements that anyone can repeat: each prints ratios of figures taken in turn within one run."""

import worker_node  # noqa: F401  (turns OpenVINO's telemetry off, before a benchmark imports OpenVINO)
