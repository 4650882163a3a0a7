"""Bugs of stock PyTorch that streams and graphs meet, one a file, each a pull request of its own."""
