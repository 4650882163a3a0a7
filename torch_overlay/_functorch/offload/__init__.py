"""Moves saved activations to the host: chooses which and when, and rewrites the graphs."""
