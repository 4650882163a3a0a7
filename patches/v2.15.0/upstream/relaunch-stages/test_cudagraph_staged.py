# Owner(s): ["module: inductor"]

import ctypes
import functools
import weakref
from types import SimpleNamespace

import torch
from torch._inductor.cudagraph_relaunch.arrange import Arrangement, Stage
from torch._inductor.cudagraph_relaunch.native_call import Misaligned
from torch._inductor.cudagraph_relaunch.nodes import NumberSlot, Template
from torch._inductor.cudagraph_relaunch.outputs import (
    Computed,
    Given,
    Layout,
    OfStorage,
    Repeated,
    SameInput,
    Storage,
    View,
)
from torch._inductor.cudagraph_relaunch.relaunch import Relaunch
from torch._inductor.cudagraph_relaunch.staged import (
    graph_of,
    launchable,
    launches_of,
    Split,
    stages_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase


VECTOR = View((4,), (1,), torch.float32)
N = ("input", 2, int)
NUMBERS = (NumberSlot(0, 0, "l", N),)


def at(address):
    memory = (ctypes.c_float * 4).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32)


class Launcher:
    """Launches `run(tensors of the stage's regions, ...)` on what was patched last."""

    exec, nodes = None, 3

    def __init__(self, run, regions, numbers=()):
        self.template, self.run = Template(regions, (), (), numbers), run
        self.bases, self.values = [None] * regions, []

    def patch(self, bases, regions):
        for region, base in zip(regions, bases):
            self.bases[region] = base if isinstance(base, int) else base.data_ptr()
        return len(bases)

    def write(self, values):
        self.values = [int.from_bytes(value, "little") for value in values]

    def replay(self):
        self.run(*[at(base) if base else None for base in self.bases], *self.values)


class TestStages(TestCase):
    """Of inputs x and y and a number n, the first stage makes a = x * y and b = x + n,
    the second c = a + b + y. The region returns (c, b, "text", y, n, c)."""

    def setUp(self):
        super().setUp()
        self.made = []  # what empty() returned
        self.alive = []  # in the second stage: which of x and that live

    def empty(self, size, stride, dtype):
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made.append(weakref.ref(made))
        return made

    def first(self, x, y, a, b, n):
        torch.mul(x, y, out=a)
        torch.add(x, n, out=b)

    def second(self, a, b, y, c):
        self.alive += [each() is not None for each in self.made]
        torch.add(a, b, out=c).add_(y)

    def make(self, alignments=(4, 4, 1), static=()):
        made = [OfStorage(i, VECTOR) for i in range(3)]
        rest = Given("text"), SameInput(1), Computed(N), Repeated(0)
        storages = 3 * (Storage(16),)
        whole = Layout((0, 1), storages, (made[2], made[1], *rest), ())
        one = Layout((0, 1), storages[:2], (made[0], made[1]), (32, 16))
        two = Layout((0, 1, 2), storages[:1], (made[0],), ())
        # Slots: 0 and 1 are x and y, then a, b and c. The number comes after tensors.
        number = (NumberSlot(0, 0, "l", N),)
        stages = (
            Stage((0,), one, Template(6, (), (), number), (0, 1), (2, 3), (0,)),
            Stage((1,), two, Template(6, (), ()), (2, 3, 1), (4,), (1, 2)),
        )
        arrangement = Arrangement(
            whole,
            Template(4, (), (), NUMBERS),
            stages,
            (0, 1),
            5,
            ((0, 4), (1, 3), (5, 4)),
        )
        launchers = (
            Launcher(lambda x, y, a, b, s, t, n: self.first(x, y, a, b, n), 6, number),
            Launcher(lambda a, b, y, c, s, t: self.second(a, b, y, c), 6),
        )
        device = SimpleNamespace(empty=self.empty)
        return launchable(device, arrangement, launchers, static, alignments)

    def test_outputs(self):
        made = self.make(static=(1,))
        self.assertIsInstance(made, Split)
        y = torch.randn(4)
        for n in (3, 8):
            x = torch.randn(4)
            inputs = [x, y, n]
            c, b, *rest, again = made.launch(inputs)
            self.assertEqual((b, c), (x + n, x * y + x + n + y))
            self.assertIs(again, c)
            self.assertEqual((rest[0], rest[2], inputs), ("text", n, []))
            self.assertIs(rest[1], y)

    def test_what_was_used_is_freed(self):
        made, x = self.make(), torch.randn(4)
        self.made.append(weakref.ref(x))
        inputs = [x, torch.randn(4), 1]
        del x
        c, b, *_ = made.launch(inputs)
        # x and the scratch went with the first stage; a, b and c are left.
        self.assertEqual(self.alive, [False, False, True, True, True])
        self.assertEqual([ref() for ref in self.made[2:]], [None, b, c])

    def test_callers_tensors(self):
        made = self.make()
        x, y = torch.randn(4), torch.randn(4)
        self.assertIs(made.launch([x, y.clone(), 1], [x, y, 1])[3], y)

    def test_misaligned_input(self):
        made = self.make(alignments=(4, 16, 1))
        base = torch.zeros(16)
        odd = base[-base.data_ptr() // 4 % 4 + 1 :][:4]
        inputs = [torch.randn(4), odd, 1]
        with self.assertRaises(Misaligned):
            made.launch(inputs)
        self.assertEqual((len(inputs), made.totals), (3, (0, 0)))

    def test_counts(self):
        made = self.make()
        for _ in range(3):
            made.launch([torch.randn(4), torch.randn(4), 1])
        self.assertEqual(made.totals[0], 6)
        self.assertEqual((launches_of(made), launches_of(None)), (3, 0))
        self.assertEqual(tuple(graph_of(made)), (2, 6, 1024, 0))
        verified = SimpleNamespace(relaunch=made)
        self.assertEqual(stages_of(verified), made.stages)

    def test_nodes_that_no_launch_needs(self):
        for kept in ((), ("a node",)):
            made = self.make()
            made.template = Template(4, ("a node",), ("a slot",), NUMBERS)
            for stage, nodes in zip(made.stages, ((), kept)):
                stage.launcher.template = Template(6, ("a node",), ())
                left = Template(6, nodes, ())
                forget = functools.partial(setattr, stage.launcher, "template", left)
                stage.launcher.forget = forget
            made.forget()
            self.assertEqual(made.template.nodes, kept)
            self.assertEqual(made.template.numbers, NUMBERS)

    def test_graph_that_is_launched_whole(self):
        layout = Layout((0,), (Storage(16),), (OfStorage(0, VECTOR),), ())
        launcher = Launcher(lambda x, out, s, t: torch.neg(x, out=out), 4)
        arrangement = Arrangement(layout, launcher.template)
        device = SimpleNamespace(empty=self.empty)
        made = launchable(device, arrangement, [launcher], (), (4,))
        self.assertIsInstance(made, Relaunch)
        x = torch.randn(4)
        self.assertEqual(made.launch([x]), (-x,))
        self.assertEqual((launches_of(made), graph_of(made).launches), (1, 1))
        with self.assertRaises(ValueError):
            launchable(device, arrangement, [launcher, launcher], (), (4,))


if __name__ == "__main__":
    run_tests()
