"""Sampling from a language model with a key/value cache."""
