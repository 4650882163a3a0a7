"""Streams in AOTAutograd: from the user's stream program to the placement of FX nodes, forward and backward."""
