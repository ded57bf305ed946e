"""Record a leap trace: prompts of a file through a local vLLM, with features and true lengths."""
