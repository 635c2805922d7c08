"""The routes of text generation: `native`, `openai` (chat, completions), `responses`, `anthropic`, `ollama`, and vLLM's
`tokenize`.

`fields` and `conversation` hold what the bodies of OpenAI's routes share, `parameters` which parameter of each dialect
is which field of `Sampling`, `replies` how every dialect answers. `registration` names all of it to the node.
"""
