"""Rewrites of compiled code that keep host memory out of it, where no program can tell the difference."""
