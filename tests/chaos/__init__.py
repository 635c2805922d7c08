"""Three real nodes and the client under mixed load, with faults on a seeded schedule and invariants checked throughout.

`python -m tests.chaos --seed 1 --seconds 180` runs one seed; a violation prints the seed that repeats it.
"""
