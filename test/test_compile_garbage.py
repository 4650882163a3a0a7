"""What a call that compiles has made is gone when the program has dropped it, without the garbage collector."""

import contextlib
import gc
import itertools
import weakref
from collections import OrderedDict

import torch
import torch._inductor.config
from torch._dynamo.test_case import TestCase
from torch._inductor import pattern_matcher

import form
from torch_overlay.upstream_fixes import pattern_traceback


class Result:
    pass


class Items(OrderedDict):
    """Its attributes are items, too."""

    def __setattr__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


@contextlib.contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TestCompileGarbage(TestCase):
    @form.slow
    def test_backward_that_is_compiled_keeps_nothing(self):
        """Patterns that don't match."""
        layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
        x = torch.randn(8, 16, requires_grad=True)
        with no_collection(), torch._inductor.config.patch(force_disable_caches=True):
            loss = torch.compile(lambda x: layers(x).square().mean())(x)
            made, node = weakref.ref(loss), weakref.ref(loss.grad_fn)
            loss.backward()
            del loss
            self.assertIsNone(made(), "the loss")
            self.assertIsNone(node(), "what was saved for the backward")

    def test_objects_with_attributes_are_not_kept(self):
        """Variables of their dictionaries."""

        def fill(result, x):
            result.value = x.sin()
            return result.value + 1

        def count(result, x):
            return x.sin() + len(result.__dict__)

        for fn, kind in itertools.product((fill, count), (Result, Items)):
            torch._dynamo.reset()
            x, result = torch.randn(8), kind()
            result.given = x
            expected = x.sin() + 1
            with self.subTest(f"{fn.__name__}, {kind.__name__}"), no_collection():
                self.assertEqual(torch.compile(fn, backend="eager")(result, x), expected)
                made = [weakref.ref(result), weakref.ref(x)]
                del result, x
                self.assertEqual([ref() for ref in made], [None, None])

    def test_failure_is_still_told(self):
        def fail(pattern, node):
            try:
                raise pattern_matcher.FailedMatch("no {what}", what="match")
            except pattern_matcher.FailedMatch as failure:
                return failure

        found = pattern_traceback.match(fail, None, None)
        self.assertFalse(pattern_matcher.is_match(found))
        self.assertEqual(str(found), "no match")
        self.assertIsNone(found.__traceback__)
        self.assertEqual(pattern_traceback.match(lambda pattern, node: (pattern, node), 1, 2), (1, 2))
