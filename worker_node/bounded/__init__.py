"""The bounded jobs profile: one model on the NPU, one generation at a time, proof with each.

It may import everything but `cli`. Begin with `service`, which runs a job and proves it; `jobs` says what the jobs
are, `profile` serves them over HTTP.
"""
