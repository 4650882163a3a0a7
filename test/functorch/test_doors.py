"""The doors with objects of other plugins: they know nothing of the package's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay.doors import stream_policy


class Recorder:
    """Stream policy that leaves all nodes where they are, and records calls."""

    handles = True

    def __init__(self) -> None:
        self.placed: list[tuple[bool, list[Any]]] = []
        self.after: list[float] = []
        self.bases: list[torch.Tensor] = []
        self.x: torch.Tensor | None = None

    def handles_streams(self) -> bool:
        return self.handles

    def place(self, gm: torch.fx.GraphModule, metadata: Any, is_joint: bool) -> None:
        nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        self.placed.append((is_joint, [node.meta["custom"]["stream"] for node in nodes]))

    def after_epilogue(self, metadata: Any) -> Any:
        return (lambda: self.after.append(float(self.x.detach().sum()))) if self.x is not None else None

    def view_makers(self, metadata: Any) -> list[Any]:
        def make_view(base: torch.Tensor, make: Any) -> torch.Tensor:
            self.bases.append(base)
            return make(base)

        return [None, make_view]


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with fx_traceback.annotate({"stream": 7}):
        x.mul_(2)
        y = x.sin()
    return y, x.view(-1)


class TestStreamPolicy(TestCase):
    def call(self, policy: Recorder, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        policy.x = x
        with mock.patch.object(stream_policy, "policy", return_value=policy):
            return torch.compile(step, backend="aot_eager", fullgraph=True)(x)

    def test_policy_is_asked_for_each_graph_and_after_its_epilogue(self) -> None:
        for is_joint in (False, True):
            torch._dynamo.reset()
            policy, x = Recorder(), torch.ones(2, 2, requires_grad=is_joint) * 1
            y, view = self.call(policy, x)
            self.assertEqual(policy.placed, [(is_joint, [7])])
            self.assertEqual((x, y), (torch.full((2, 2), 2.0), x.sin()))
            self.assertEqual(policy.bases, [x])
            self.assertEqual(view.data_ptr(), x.data_ptr())
            self.assertEqual(policy.after, [8.0])

    def test_policy_that_does_not_handle_streams_leaves_them_to_upstream(self) -> None:
        """Which refuses the update of an input on a stream."""
        policy = Recorder()
        policy.handles = False
        with self.assertRaisesRegex(RuntimeError, "user-specified streams"):
            self.call(policy, torch.ones(2, 2, requires_grad=True) * 1)
        self.assertEqual(policy.placed, [])

    def test_mark_of_a_joint_graph_is_taken_back(self) -> None:
        metas: list[dict[str, Any]] = []

        class Policy(Recorder):
            def place(self, gm: torch.fx.GraphModule, metadata: Any, is_joint: bool) -> None:
                metas.append(dict(gm.meta))
                super().place(gm, metadata, is_joint)

        self.call(Policy(), torch.ones(2, 2, requires_grad=True) * 1)
        self.assertEqual([[key for key in meta if "policy" in key] for meta in metas], [[]])
