# Owner(s): ["module: aotdispatch"]

from torch._functorch._activation_offloading.settings import parse, Settings
from torch.testing._internal.common_utils import run_tests, TestCase


MIB = 1 << 20


class TestOffloadSettings(TestCase):
    def check(self, value, *settings):
        self.assertEqual(parse(value, "offload"), Settings(*settings))

    def test_off(self):
        for value in (None, "", "none", "None"):
            self.assertIsNone(parse(value, "offload"))

    def test_as_much_as_the_device_has(self):
        self.check("auto", None, False, MIB)

    def test_budget(self):
        self.check({"budget_gb": 1.5}, 1_500_000_000, True, MIB)
        self.check({"budget_gb": 0}, 0, True, MIB)
        every = {"budget_gb": 2, "strict": False, "min_bytes": 0}
        self.check(every, 2_000_000_000, False, 0)
        self.check({"budget_gb": 2, "min_bytes": 5}, 2_000_000_000, True, 5)

    def test_budget_from_the_environment(self):
        self.check("2", 2_000_000_000, True, MIB)
        self.check("0.5", 500_000_000, True, MIB)

    def test_anything_else_is_one_error(self):
        for value in (
            3,
            True,
            "much",
            "-1",
            "nan",
            "inf",
            [],
            {},
            {"budget": 1},
            {"budget_gb": 1, "other": 1},
            {"strict": True},
            *({"budget_gb": b} for b in (-1, "1", None, True, float("nan"), 1e999)),
            *({"budget_gb": 1, "strict": s} for s in (1, None, "yes")),
            *({"budget_gb": 1, "min_bytes": b} for b in (-1, 1.5, None, True)),
        ):
            with self.assertRaises(ValueError, msg=repr(value)) as caught:
                parse(value, "the option")
            self.assertRegex(
                str(caught.exception), '^the option is .*; it must be None, "auto", or'
            )
            if not isinstance(value, str):  # a number was made of it
                self.assertIn(f"is {value!r}; ", str(caught.exception))


if __name__ == "__main__":
    run_tests()
