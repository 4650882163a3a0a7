"""Where the memory of a graph lies: outputs, scratch, and what they are made of at a call."""
