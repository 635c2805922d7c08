"""Turns published weights into models that OpenVINO runs, without torch; runs in a process of its own.

It may import what `models` may. Begin with `job.perform`; then there is a module for each family of models.
"""
