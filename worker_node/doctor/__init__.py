"""Finds what a machine lacks for its NPU to work, each with its fix; reads files and changes nothing.

It may import `core` and `devices`. Begin with `examine` in `checks.py`.
"""
