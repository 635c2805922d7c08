"""Engines of encoders, whatever their task: rows of token ids in, one vector for each row out, in batches.

Begin with `jobs` (messages, bookkeeping, options); `dynamic` runs them on CPU and GPU, `static` on the NPU. Imports
`engines`, `scheduling` and `devices`; runs inside engine processes."""
