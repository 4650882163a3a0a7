"""Regions with conditions: one graph, in which the device takes the branch that the predicate picks."""

import torch
from torch._dynamo.test_case import run_tests

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay._inductor.relaunch.capture import branches
from torch_overlay._inductor.relaunch.capture.branches import choose


def with_branches(source, false, true):
    """The source of a region, and of the two branches that it chooses from."""
    return "\n".join(
        [region(*false).replace("region", "false_graph"), region(*true).replace("region", "true_graph"), source]
    )


CHOICE = region(
    "p, x, w",
    "buf0 = torch.mul(x, w, out=new(4, 4))",
    "buf1_args = [p, buf0, w]",
    "del p, buf0",
    "buf1 = choose(buf1_args, false_graph, true_graph)",
    "buf2 = buf1[0]",
    "del buf1",
    "buf3 = torch.add(buf2, w, out=new(4, 4))",
    "return (buf2, buf3)",
)
SINE = (
    "a, b",
    "buf0 = torch.mul(a, b, out=new(4, 4))",
    "del a",
    "buf1 = torch.sin(buf0, out=new(4, 4))",
    "return (buf1,)",
)
COSINE = "a, b", "buf0 = torch.cos(a, out=new(4, 4))", "return (buf0,)"


class TestConditions(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        branches._run.clear()

    def call(self, run, value):
        return run([torch.tensor(value), *self.inputs()])

    def inputs(self):
        return torch.randn(4, 4), torch.randn(4, 4)

    def check(self, run, expected, outcomes=(True, False, False, True, True, False, True)):
        """Call a region for these outcomes, with other inputs each time, and compare the results."""
        held = []
        for outcome in outcomes:
            x, w = self.inputs()
            want = expected(outcome, x.clone(), w.clone())
            held.append((want, run([torch.tensor(outcome), x, w])))
        self.assertEqual(*map(list, zip(*held)))

    def test_device_takes_the_branch_that_the_predicate_picks(self):
        run = self.runner(with_branches(CHOICE, COSINE, SINE), choose=choose)

        def expected(outcome, x, w):
            y = x * w
            z = (y * w).sin() if outcome else y.cos()
            return z, z + w

        self.check(run, expected)
        self.assertEqual(self.counted("captures"), 1)
        self.assertEqual(self.counted("relaunches"), 5)
        (made,) = self.device.executables
        self.assertEqual(made.taken, [False, True, True, False, True])


if __name__ == "__main__":
    run_tests()
