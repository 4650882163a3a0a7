"""Streams in AOTAutograd: from the user's stream program to the placement of FX nodes, forward and backward.

Begin with `placement`, which `hooks` calls for each graph. It reads the program with the clocks of `program`, and
writes `facts` on the nodes, whose order with the outside is made of `tokens`. `fx` has the words for nodes, `ids` for
numbers of streams. `memory` says whose memory a value is in eager. `backward` and `saved_values` settle what crosses
from the forward to the backward; `epilogue` what runs after a graph.
"""

# Modules of Dynamo import some of this package, and these some of Dynamo: that works if Dynamo comes first.
import torch._dynamo  # noqa: F401
