"""Streams and events in traced programs, and the objects behind their numbers."""
