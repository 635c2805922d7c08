"""The form of an answer as a grammar: a JSON schema, an expression, or calls of tools.

GenAI's runtime (xgrammar) takes a JSON schema by itself, but not to the letter: measured with openvino-genai 2026.4.1,
it lets `4` pass for `multipleOf: 3` and `-1` for `maximum: -3`, writes `7G5` for a bounded number, and a schema that
it cannot read raises out of the pipeline's step and leaves the pipeline unusable. So the grammar is made here: what it
admits is valid against the schema, what cannot be enforced is refused by name or, where the schema is not strict,
dropped and listed, and the runtime only gets grammars that it can read in bounded time.

The package owns everything between a schema and the EBNF for the runtime, imports only `worker_node.core.errors`, and
runs in preparation processes. Begin with `form.compile_form`, which translates a whole request, then read
`schema.Compiler` (one JSON schema, its objects and lists), `combining` (`allOf`, `anyOf`, `oneOf`, `$ref`), and
`scalars` (strings and numbers). `pattern` translates expressions, `regular` makes automata where the runtime could not
follow an expression, `cost` bounds what the result costs the runtime.
"""
