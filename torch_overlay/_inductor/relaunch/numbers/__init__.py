"""Finds which words of a graph are computed from a region's numbers, so that a launch can compute and patch them."""
