"""A small text encoder that reads prompts before the engine does: in a process of its own, with a client that never blocks."""
