# Owner(s): ["module: inductor"]

from torch._inductor import config
from torch.testing._internal.common_utils import run_tests, TestCase


VALUES = {
    "triton.cudagraph_templates": 7,
    "triton.cudagraph_executables": 0,
    "triton.cudagraph_verify": True,
}


class TestOptions(TestCase):
    def test_defaults(self):
        triton = config.triton
        self.assertEqual(triton.cudagraph_templates, 64)
        self.assertEqual(triton.cudagraph_executables, 64)
        self.assertIs(triton.cudagraph_verify, False)
        self.assertIs(triton.cudagraph_concurrency, True)
        self.assertIs(triton.cudagraph_rewrites, True)
        self.assertIs(triton.nvtx, False)

    def test_patch(self):
        with config.patch(VALUES):
            self.assertEqual(config.triton.cudagraph_templates, 7)
            self.assertIs(config.triton.cudagraph_verify, True)
        self.assertEqual(config.triton.cudagraph_templates, 64)

    def test_code_is_the_same(self):
        """They are in no key of a cache."""

        def key():
            saved = config.save_config_portable(ignore_private_configs=False)
            return {name for name in saved if name in VALUES}, saved

        names, before = key()
        with config.patch(VALUES):
            self.assertEqual(key()[1], before)
        self.assertEqual(names, set())
        for other in ("cudagraph_concurrency", "cudagraph_rewrites", "nvtx"):
            other = f"triton.{other}"
            with config.patch({other: not before[other]}):
                self.assertNotEqual(key()[1], before)


if __name__ == "__main__":
    run_tests()
