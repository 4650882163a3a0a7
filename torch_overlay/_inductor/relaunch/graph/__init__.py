"""Reads, edits and splits captured CUDA graphs, through the driver."""
