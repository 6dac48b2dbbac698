"""Losses, reductions, objectives and the update they make."""
