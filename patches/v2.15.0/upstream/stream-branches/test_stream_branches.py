# Owner(s): ["module: dynamo"]

from unittest import mock

import torch
from torch._dynamo.test_case import run_tests, TestCase


def stream(stream_id):
    return torch.Stream(stream_id=stream_id, device_index=0, device_type=1)


class TestStreamBranches(TestCase):
    def setUp(self):
        super().setUp()
        self.entered = []  # ids of the streams that are current now
        self.tested = []  # the same, at each test of a tensor
        read = torch.Tensor.__bool__

        @torch._dynamo.disable
        def test(tensor):
            self.tested.append(list(self.entered))
            return read(tensor)

        enter, leave = self.entered.append, self.entered.pop
        for owner, name, fake in (
            (
                torch.cuda.StreamContext,
                "__enter__",
                lambda c: enter(c.stream.stream_id),
            ),
            (torch.cuda.StreamContext, "__exit__", lambda c, *exc: leave() and None),
            (torch.Tensor, "__bool__", test),
        ):
            patch = mock.patch.object(owner, name, fake)
            patch.start()
            self.addCleanup(patch.stop)
        self.side, self.other = stream(7), stream(9)

    def results(self, function):
        """Return what a function returns for 1 and for -1 when it has been compiled."""
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            self.tested.clear()
            numbers = torch.tensor(1.0), torch.tensor(-1.0)
            found = [compiled(number, self.side, self.other) for number in numbers]
        self.on_streams = list(self.tested)  # before assertions test tensors
        self.assertEqual(self.entered, [])
        return found

    def test_branch_in_a_block(self):
        def f(x, side, other):
            with torch.cuda.stream(side):
                if x * 2 > 0:
                    x = x * 3
                    return x - 1
                return x - 1

        self.assertEqual(self.results(f), [torch.tensor(2.0), torch.tensor(-2.0)])
        self.assertEqual(self.on_streams, [[7], [7]])

    def test_branch_in_two_blocks(self):
        def f(x, side, other):
            with torch.cuda.stream(side), torch.cuda.stream(other):
                if not x * 2 > 0:
                    return x - 1
                return x + 1

        self.assertEqual(self.results(f), [torch.tensor(2.0), torch.tensor(-2.0)])
        self.assertEqual(self.on_streams, [[7, 9], [7, 9]])

    def test_value_that_the_branch_keeps(self):
        def f(x, side, other):
            with torch.cuda.stream(side):
                both = (x > 0) and (x + 1)
                either = (x > 0) or (x - 1)
            return both, either

        yes, no = torch.tensor(True), torch.tensor(False)
        self.assertEqual(
            self.results(f), [(torch.tensor(2.0), yes), (no, torch.tensor(-2.0))]
        )
        # The jump tests the value once more where it may keep it.
        self.assertEqual(self.on_streams[0], [7])
        self.assertEqual(self.on_streams.count([7]), 4)

    def test_branch_behind_a_block_has_no_stream(self):
        def f(x, side, other):
            with torch.cuda.stream(side):
                y = x * 2
            return y + 1 if y > 0 else y - 1

        self.assertEqual(self.results(f), [torch.tensor(3.0), torch.tensor(-3.0)])
        self.assertEqual(self.on_streams, [[], []])

    def test_error_of_the_test_leaves_the_streams(self):
        def f(x, side, other):
            with torch.cuda.stream(side):
                return x + 1 if x > 0 else x - 1

        compiled = torch.compile(f, backend="eager")
        for _ in range(2):
            self.tested.clear()
            with self.assertRaisesRegex(RuntimeError, "ambiguous"):
                compiled(torch.ones(3), self.side, self.other)
        self.assertEqual(self.tested, [[7]])
        self.assertEqual(self.entered, [])


if __name__ == "__main__":
    run_tests()
