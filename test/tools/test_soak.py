"""The soak: what counts as growth, and that a wrong value or a leak is reported."""

import contextlib
import io
import types
import unittest
import unittest.mock
from typing import Any

import soak
import streams
import torch


def samples(**columns: list[float]) -> list[soak.Sample]:
    count = len(next(iter(columns.values())))
    return [{"captures": 5, **{name: values[i] for name, values in columns.items()}} for i in range(count)]


def run(*programs: str, **changed: Any) -> tuple[int, str]:
    chosen = {name: soak.PROGRAMS[name] for name in programs} | changed
    out = io.StringIO()
    about = dict.fromkeys(("hardware", "torch, cuda, triton", "commit"), "")
    patches = {"PROGRAMS": chosen, "streams": types.SimpleNamespace(describe=lambda: about, aligned=streams.aligned)}
    with unittest.mock.patch.multiple(soak, **patches), contextlib.redirect_stdout(out):
        status = soak.main(["--device", "cpu", "--relaunches", "40", "--every", "10"])
    return status, out.getvalue()


class TestSoak(unittest.TestCase):
    def test_memory_that_grows_slowly_is_growth(self) -> None:
        self.assertEqual(soak.growth(samples(reserved=[2.0, 2.0, 2.0, 2.5])), {"reserved": 0.5})
        self.assertEqual(soak.growth(samples(host=[100.0, 107.0, 101.0, 107.0])), {})
        self.assertEqual(list(soak.growth(samples(host=[100.0, 103.0, 106.0, 109.0]))), ["host"])

    def test_growth_counts_from_the_last_capture(self) -> None:
        warm = samples(reserved=[2.0, 8.0, 8.0, 8.0], captures=[3, 5, 5, 5])
        self.assertEqual(soak.growth(warm), {})
        late = {"reserved": [2.0, 2.0, 2.0, 2.0], "captures": [3, 3, 3, 5]}
        self.assertEqual(soak.growth(samples(**late)), {})  # a size whose turn has come
        self.assertEqual(soak.growth(samples(**late, **{"captured again": [0, 0, 0, 1]})), {"captured again": 1})

    def test_programs_run_and_agree(self) -> None:
        status, text = run("training", "many sizes", "in place")
        self.assertEqual(status, 0, text)
        self.assertIn("48 relaunches, 16 calls of each of 3 programs, ", text)

    def test_wrong_value_ends_it(self) -> None:
        made = iter((1.0, 1.5))

        def differs(device: str, compile: soak.Compile) -> soak.Call:
            value = torch.full((2,), next(made))
            return lambda i: [value]

        status, text = run("inference", drifting=differs)
        self.assertEqual(status, 1)
        self.assertIn("different: drifting, inputs 0: ", text)


if __name__ == "__main__":
    unittest.main()
