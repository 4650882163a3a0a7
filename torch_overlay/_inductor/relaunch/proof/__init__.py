"""Finds every pointer that a captured graph depends on, and proves that there are no others."""
