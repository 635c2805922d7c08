"""Text generation: from a request with a prompt or a conversation to the blocks of its answer.

Owns the tokenizer and chat template of a model, tool calls and reasoning in its output, images in its prompts, and the
engines that generate (`continuous` on CPU and GPU, `stateful` on the NPU); `http` has the routes of all dialects and is
the only part that knows HTTP. It may import `serving`, `structured_output` and what is below them. Begin with
`service.generate`, then read `prompting` (a request becomes an engine's job) and `answer` (tokens become blocks).
"""
