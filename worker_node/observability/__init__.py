"""Metrics and recent failures, and spans of OpenTelemetry.

Imports `core` and the messages of `engines`. Read `metrics` first.
"""
