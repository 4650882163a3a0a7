"""Captured CUDA graphs: read, edited and split, through the driver."""
