"""A launch: a graph bound to what a call needs, patched in C."""
