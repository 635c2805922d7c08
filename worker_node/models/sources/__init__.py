"""Where models come from: what a name stands for, what a source holds, and how its files get here.

Begin with `reference` (names), then `selection` (which files are taken, before anything large is downloaded) and
`downloads`; `check` answers the dry run of a pull. It may import what `models` may.
"""
