"""What everything else stands on: errors, plain data, the operating system, and the environment of child processes.

Imports nothing of the node but the registry. Read `errors` first.
"""
