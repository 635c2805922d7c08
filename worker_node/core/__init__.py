"""What everything else stands on: errors, plain data, the operating system, and the environment of child processes.

Imports nothing else of the node. Read `errors` first, then `types`.
"""
