"""Orchestration: the only rooms that jit and touch devices, and what a person sees of a run."""
