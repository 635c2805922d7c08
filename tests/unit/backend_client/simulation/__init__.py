"""Deterministic simulation of the client: virtual time, scripted nodes in memory, faults and load from one seed.

python -m tests.unit.backend_client.simulation --seeds 0:10000 --jobs 4
"""
