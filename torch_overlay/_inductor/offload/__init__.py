"""Copies of saved activations in Inductor: where they stand in a schedule, and what generated code calls."""
