"""Lets one executable graph serve many sizes: what a new size changes is learned by one capture, and patched."""
