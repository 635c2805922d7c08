"""OpenAI's SDK over the fleet: its client with a transport of ours. Imported only by those who ask for it.

It may import `calls` and `http`. Begin with `client.openai_over`; `routes` turns the SDK's requests into calls, and
their results into its replies.
"""
