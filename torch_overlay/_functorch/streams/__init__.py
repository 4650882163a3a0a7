"""Streams in AOTAutograd: from the user's stream program to the placement of FX nodes, forward and backward."""

# Modules of Dynamo import some of this package, and these some of Dynamo: that works if Dynamo comes first.
import torch._dynamo  # noqa: F401
