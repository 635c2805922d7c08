"""JSON Schema to a grammar that a generation is held to.

GenAI's runtime (xgrammar) takes a JSON Schema by itself, but not to the letter: measured with openvino-genai 2026.4.1,
it lets `4` pass for `multipleOf: 3` and `-1` for `maximum: -3`, writes `7G5` for a bounded number and raw control
characters into a string with `minLength`, and a schema that it cannot read raises out of the pipeline's step and
leaves the pipeline unusable. So the grammar is made here: what it admits is valid against the schema, what cannot be
held to is refused by name before any engine sees it, and the runtime is only ever given a grammar that it can read.
"""
