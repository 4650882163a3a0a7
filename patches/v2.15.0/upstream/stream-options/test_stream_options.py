# Owner(s): ["module: inductor"]

from torch._inductor import config
from torch.testing._internal.common_utils import run_tests, TestCase


class TestOptions(TestCase):
    def test_defaults(self):
        self.assertIs(config.triton.streams, False)
        self.assertEqual(config.triton.fold_branches_below_us, 5.0)

    def test_code_is_another(self):
        """They are in the key of a cache."""

        def key():
            return config.save_config_portable(ignore_private_configs=False)

        before = key()
        for changed in (
            {"triton.streams": True},
            {"triton.fold_branches_below_us": 0.0},
        ):
            with config.patch(changed):
                self.assertEqual(key(), {**before, **changed})
        self.assertEqual(key(), before)


if __name__ == "__main__":
    run_tests()
