"""Saved activations on the host: which of them, when, and the graphs rewritten so."""
