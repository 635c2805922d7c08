"""The node over HTTP: its own API and the parts of OpenAI's and Ollama's that no task owns.

It owns connections, bodies, errors, keys and headers, and may import everything below `tasks`. Begin with `middleware`,
which every request passes, then `context`, `body` and `replies`; `routes` has what a task brings along.
"""
