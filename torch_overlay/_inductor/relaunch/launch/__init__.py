"""Launches captured graphs: binds all that a call needs beforehand, and patches the graph in C."""
