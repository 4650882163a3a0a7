# Owner(s): ["module: dynamo"]

import contextlib
import gc
import weakref

import torch
import torch._inductor.config
from torch._dynamo.test_case import run_tests, TestCase


class Result:
    pass


@contextlib.contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TestCompileGarbage(TestCase):
    def test_compiled_backward_keeps_nothing(self):
        layers = torch.nn.Sequential(
            torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16)
        )
        x = torch.randn(8, 16, requires_grad=True)
        fresh = torch._inductor.config.patch(force_disable_caches=True)
        with no_collection(), fresh:
            loss = torch.compile(lambda x: layers(x).square().mean())(x)
            kept = [weakref.ref(loss), weakref.ref(loss.grad_fn)]
            loss.backward()
            del loss
            self.assertEqual([ref() for ref in kept], [None, None])

    def test_object_with_attributes_is_not_kept(self):
        def fill(result, x):
            result.value = x.sin()
            return result.value + 1

        x, result = torch.randn(8), Result()
        result.given = x
        with no_collection():
            torch.compile(fill, backend="eager")(result, x)
            kept = [weakref.ref(result), weakref.ref(x)]
            del result, x
            self.assertEqual([ref() for ref in kept], [None, None])


if __name__ == "__main__":
    run_tests()
