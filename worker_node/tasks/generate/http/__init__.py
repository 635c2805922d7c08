"""The routes of text generation: `native`, `openai` (chat, completions), `responses`, `anthropic`, `ollama`, and vLLM's
`tokenize`.

`fields` and `conversation` hold what the bodies of OpenAI's routes share, `replies` what their replies share.
`registration` names all of it to the node.
"""
