"""What a model writes between the lines: tool calls and reasoning, told apart from the answer while it streams."""
