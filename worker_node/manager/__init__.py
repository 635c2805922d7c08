"""The only component that loads and unloads models: what is in memory, under which names, and until when.

It may import engines, models, scheduling and devices; it knows no task and no HTTP. Read `manager` first, then
`policy`, the pure plan that `reconciler` carries out.
"""
