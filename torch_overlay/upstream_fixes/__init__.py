"""Fix bugs of stock PyTorch that streams and graphs meet, one per file, each a pull request of its own."""
