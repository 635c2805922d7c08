"""OpenAI's SDK over the fleet: its client with a transport of ours. Imported only by those who ask for it."""
