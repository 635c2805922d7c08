"""The bounded jobs profile (spec: bounded-jobs): one model on the NPU, one generation at a time, proof with each."""
