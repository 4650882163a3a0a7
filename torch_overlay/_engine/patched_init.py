"""Streams and CUDA graphs for torch.compile: what the hooks in torch's compiler modules call.

Nothing is imported here: upstream files import torch._overlay.hooks at their top, and a hook imports what it needs when
it is first called. Options are in torch._overlay.config.
"""
