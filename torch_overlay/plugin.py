"""The objects that this package registers with the doors: module of `doors` -> object that it asks."""

OBJECTS = {
    "stream_policy": "torch_overlay._functorch.streams.hooks:POLICY",
}
