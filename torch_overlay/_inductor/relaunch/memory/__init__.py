"""Lays out the memory of a graph, its outputs and its scratch, and says how a call makes the outputs."""
