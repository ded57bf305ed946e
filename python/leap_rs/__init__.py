"""Output-length prediction and length-aware scheduling for vLLM."""
