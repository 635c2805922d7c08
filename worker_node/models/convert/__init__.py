"""Turns published weights into models that OpenVINO runs, without torch; runs in a process of its own."""

from __future__ import annotations
