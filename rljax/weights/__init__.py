"""Checkpoints of other systems: Hugging Face directories in and out, GGUF files in."""
