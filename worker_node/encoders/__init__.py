"""Engines of encoders, whatever their task: rows of token ids in, one vector for each row out, in batches.

Begin with `jobs` (messages, options), then `runs` (bookkeeping, several at once on the device). `dynamic` is for CPU
and GPU, `static` for the NPU. Imports `engines`, `scheduling` and `devices`; runs inside engine processes."""
