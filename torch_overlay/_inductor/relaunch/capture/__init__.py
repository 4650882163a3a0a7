"""The first run of a region as a graph: recorded on addresses that mean nothing."""
