"""The only component that loads and unloads models: what is in memory, under which names, and until when."""
