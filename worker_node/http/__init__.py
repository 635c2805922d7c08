"""The node over HTTP: its own API and the parts of OpenAI's and Ollama's that no task owns.

It owns connections, bodies, errors, keys and headers, and may import everything below `tasks`. Begin with `middleware`,
which every request passes, then `body` and `errors`; `task` is what a task brings along.
"""
