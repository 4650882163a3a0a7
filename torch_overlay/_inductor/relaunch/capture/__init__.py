"""Captures a region, at placeholder addresses, and makes executable graphs of the capture."""
