"""Builds a speech recognition model of the Whisper family in OpenVINO form, without torch."""

from __future__ import annotations
