"""Metrics, spans of OpenTelemetry, and the recent failures of a node.

Imports `core` and the messages of `engines`. Read `metrics` first.
"""
