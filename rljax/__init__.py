"""rljax: reinforcement learning of reasoning language models on any JAX device mesh."""

__version__ = "0.1.0"
