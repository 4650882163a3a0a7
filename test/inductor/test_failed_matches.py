"""What a call that compiles has made is gone when the caller has dropped it, without the garbage collector."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import torch
import torch._inductor.config
from torch._dynamo.test_case import run_tests, TestCase
from torch._inductor import pattern_matcher


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import form  # noqa: F401
from torch_overlay._inductor import failed_matches


class TestFailedMatches(TestCase):
    def test_call_that_compiles_keeps_nothing(self):
        layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
        gc.collect()
        gc.disable()
        try:
            with torch._inductor.config.patch(force_disable_caches=True):
                step = torch.compile(lambda x: layers(x).square().mean())
                x = torch.randn(8, 16).mul(2).requires_grad_()
                loss = step(x)
                node = weakref.ref(loss.grad_fn)
                loss.backward()
            kept = weakref.ref(loss)
            del loss
            self.assertIsNone(kept(), "the loss")
            self.assertIsNone(node(), "what the backward is computed from")
        finally:
            gc.enable()

    def test_failure_is_still_told(self):
        def fail(pattern, node):
            try:
                raise pattern_matcher.FailedMatch("no {what}", what="match")
            except pattern_matcher.FailedMatch as failure:
                return failure

        found = failed_matches.match(fail, None, None)
        self.assertFalse(pattern_matcher.is_match(found))
        self.assertEqual(str(found), "no match")
        self.assertIsNone(found.__traceback__)
        self.assertEqual(failed_matches.match(lambda pattern, node: (pattern, node), 1, 2), (1, 2))


if __name__ == "__main__":
    run_tests()
