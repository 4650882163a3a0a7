"""What a relaunched region keeps in memory, and for how long: scratch is packed, what is saved lies in chunks, and a
backward is launched in stages that free what they have used."""

import dataclasses
import itertools
import math
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from hypothesis import given, settings, strategies as st
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase
from stand_ins.relaunch_device import Executable
from torch_overlay import config
from torch_overlay._functorch.streams.hooks import collect_bw_donated_buffer_idxs
from torch_overlay._inductor.relaunch import causes, policy, runner
from torch_overlay._inductor.relaunch.capture import recording
from torch_overlay._inductor.relaunch.capture.allocations import Lives
from torch_overlay._inductor.relaunch.capture.device import Cuda
from torch_overlay._inductor.relaunch.capture.recording import Recording
from torch_overlay._inductor.relaunch.launch import relaunch
from torch_overlay._inductor.relaunch.memory import arrange, outputs, packing
from torch_overlay._inductor.relaunch.memory.outputs import Given, OfStorage, place, Repeated, Storage, TensorView
from torch_overlay._inductor.relaunch.memory.packing import Life
from torch_overlay._inductor.relaunch.runner import COPY_SETTER
from torch_overlay._inductor.relaunch.verify import Verified
from torch_overlay.csrc import DriverError
from torch_overlay.testing import simulated_gpu


# A chain of temporaries, each used by the next operation alone.
CHAIN = """
def region(args):
    x, = args
    args.clear()
    for i in range(12):
        y = torch.add(x, i, out=new(64, 64))
        x = y
        del y
    out = torch.mul(x, 2, out=new(64, 64))
    return (out,)
"""

ROWS = """
def region(args):
    x, = args
    args.clear()
    made = []
    for rows in (0, 64, 2):
        view = x[:rows] if rows else x[0]
        y = empty_strided_cuda(tuple(view.size()), tuple(view.stride()), torch.float32)
        torch.add(view, 1, out=y)
        made.append(y)
    return tuple(made)
"""

SCRATCH = """
    y = torch.add(x, 1, out=new(64, 64))
    torch.sub(y, 1, out=y)
    del y
"""

# The backward of a row of layers: what was saved dies in turn, and a gradient is made from each. `carried` is needed
# from the first layer to the last, `held` is an input that is an output as well.
BACKWARD = """
def region(args):
    a0, a1, a2, a3, a4, a5, a6, a7, tangent, held = args
    saved = [a0, a1, a2, a3, a4, a5, a6, a7]
    del a0, a1, a2, a3, a4, a5, a6, a7
    args.clear()
    carried = torch.add(tangent, 1, out=new(64, 64))
    gradients = []
    while saved:
        a = saved.pop()
        scratch = torch.mul(a, tangent, out=new(64, 64))
        g = torch.add(scratch, carried, out=new(64, 64))
        del a, scratch
        gradients.append(g)
    held.add_(1)
    total = torch.add(carried, held, out=new(64, 64))
    return (*gradients, total, held, 7)
"""

# The same for gradients of weights that come after all others: what they are made from lives until then.
DEFERRED = """
def region(args):
    a0, a1, a2, a3, a4, a5, a6, a7, tangent = args
    saved = [a0, a1, a2, a3, a4, a5, a6, a7]
    del a0, a1, a2, a3, a4, a5, a6, a7
    args.clear()
    flows = []
    while saved:
        a = saved.pop()
        d = torch.add(a, flows[-1] if flows else tangent, out=new(64, 64))
        flows.append(d)
        del a, d
    gradients = []
    while flows:
        d = flows.pop()
        g = torch.mul(d, 3, out=new(64, 64))
        del d
        gradients.append(g)
    return tuple(gradients)
"""


def backward_inputs():
    return [torch.randn(64, 64) for _ in range(10)]


def backward_expected(inputs):
    *saved, tangent, held = [v.clone() for v in inputs]
    carried = tangent + 1
    held = held + 1
    return [*[a * tangent + carried for a in reversed(saved)], carried + held, held, 7]


class TestLives(unittest.TestCase):
    def allocate(self, lives):
        lives.tick()
        made = torch.empty(8)
        self.kept.append(made.untyped_storage())  # so that no address comes twice
        made = torch.empty(0).set_(torch._C._construct_storage_from_data_pointer(made.data_ptr(), made.device, 32))
        lives.begin(made)
        return made

    def setUp(self):
        self.kept = []

    def test_memory_ends_between_the_allocations_around_its_end(self):
        lives = Lives()
        a = self.allocate(lives)
        b = self.allocate(lives)
        first, second = a.data_ptr(), b.data_ptr()
        del a  # after the second allocation: that one must not take its place
        c = self.allocate(lives)
        end = lives.life(first, 32).freed
        self.assertGreater(end, lives.life(second, 32).made)
        self.assertLessEqual(end, lives.life(c.data_ptr(), 32).made)
        self.assertIsNone(lives.life(second, 32).freed)

    def test_views_keep_memory(self):
        lives = Lives()
        a = self.allocate(lives)
        address = a.data_ptr()
        view = a[2:]
        del a
        self.allocate(lives)
        self.assertIsNone(lives.life(address, 32).freed)
        self.assertIn(address, lives.remaining())
        del view
        b = self.allocate(lives)
        self.assertEqual(lives.life(address, 32).freed, lives.life(b.data_ptr(), 32).made)
        self.assertNotIn(address, lives.remaining())

    def test_longest_life_of_two_captures(self):
        life = Life(8, made=2, freed=5)
        for other, longest in (
            (Life(16, 2, 5), Life(16, 2, 5)),
            (Life(8, 1, 5), Life(8, 1, 5)),
            (Life(8, 2, 7), Life(8, 2, 7)),
            (Life(8, 2, None), Life(8, 2, None)),
        ):
            self.assertEqual((life.either(other), other.either(life)), (longest, longest))

    def test_what_was_there_before(self):
        lives = Lives()
        a = torch.empty(8)
        lives.begin(a)
        address = a.data_ptr()
        self.assertEqual(lives.life(address, 32), Life(32, 0, None))
        del a
        b = self.allocate(lives)
        self.assertEqual(lives.life(address, 32).freed, lives.life(b.data_ptr(), 32).made)


class TestScratch(RelaunchTestCase):
    def test_chain_of_temporaries_lies_in_two_places(self):
        run = self.runner(CHAIN)
        with mock.patch.object(arrange, "SMALL", 0):
            for _ in range(5):
                x = torch.randn(64, 64)
                self.assertEqual(run([x])[0], (x + sum(range(12))) * 2)
        (arrangement,) = self.device.arrangements
        self.assertEqual(arrangement.layout.scratch_size, 2 * 64 * 64 * 4)
        self.assertEqual(self.counted("relaunches"), 4)

    def test_workspace_that_only_captures_allocate(self):
        """A library keeps a workspace from earlier calls, and not into a capture."""
        allocated = [0, 0]

        def product(x):
            sizes = [x.nbytes]
            if (recording := getattr(self.device.thread, "recording", None)) is not None:
                recording.take(4096)
                sizes.append(4096)
            allocated[:] = allocated[0] + len(sizes), allocated[1] + sum(sizes)
            return x * 2

        library = self.enterContext(torch.library._scoped_library("workspaces", "DEF"))
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", product, "CompositeExplicitAutograd")
        self.device.allocated = lambda: tuple(allocated)
        run = self.runner("def region(args):\n    return (torch.ops.workspaces.product(args.pop()),)")
        for _ in range(3):
            x = torch.randn(4)
            self.assertEqual(run([x])[0], x * 2)
        (arrangement,) = self.device.arrangements
        self.assertEqual(arrangement.layout.scratch, (4096,))

    def allocations_of(self, source, expected):
        """Bytes of each, in order."""
        asked, empty = [], self.device.empty
        run = self.runner(source)
        self.device.empty = lambda *args: (asked.append(math.prod(args[0]) * args[2].itemsize), empty(*args))[1]
        for _ in range(4):
            asked.clear()
            x = torch.randn(64, 64)
            self.assertEqual(list(run([x])), expected(x))
        return asked

    def test_scratch_is_allocated_before_smaller_outputs(self):
        asked = self.allocations_of(CHAIN, lambda x: [(x + sum(range(12))) * 2])
        self.assertEqual(len(asked), 2)
        self.assertEqual(asked[1], 64 * 64 * 4)
        self.assertGreater(asked[0], asked[1])

    def test_larger_outputs_are_allocated_first(self):
        asked = self.allocations_of(ROWS, lambda x: [x[0] + 1, x + 1, x[:2] + 1])
        self.assertEqual(asked, [64 * 64 * 4, 2 * 64 * 4, 64 * 4])

    def test_memory_that_runs_out_at_any_allocation(self):
        """The inputs stay, what was allocated is freed, and the next call is right."""
        made, full, empty = [], [0], self.device.empty

        def allocate(*args):
            full[0] -= 1
            if not full[0]:
                raise torch.OutOfMemoryError("no memory")
            made.append(weakref.ref(tensor := empty(*args)))
            return tensor

        scratch = ROWS.replace("    made = []\n", "    made = []\n" + SCRATCH)
        run = self.runner(scratch)
        self.device.empty = allocate
        x = torch.randn(64, 64)
        expected = [x[0] + 1, x + 1, x[:2] + 1]
        for _ in range(3):
            self.assertEqual(list(run([x])), expected)
        for number in range(1, 5):
            made.clear()
            full[0] = number
            inputs = [x]
            with self.assertRaises(torch.OutOfMemoryError):
                run(inputs)
            self.assertIs(inputs[0], x)
            self.assertEqual([tensor() for tensor in made], [None] * (number - 1))
            full[0] = 0
            self.assertEqual(list(run([x])), expected)

    def test_slabs_are_no_larger_than_a_segment_of_the_allocator(self):
        """Three temporaries at once: each has a slab, and none of them is an output."""
        source = CHAIN.replace("x = y\n", "old, x = x, y\n").replace("torch.mul(x, 2,", "torch.mul(x, old,")
        source = source.replace("torch.add(x, i,", "torch.add(x, old, alpha=i,")
        run = self.runner(source.replace("    for i", "    old = x\n    for i"))
        with mock.patch.object(arrange, "SMALL", 0), mock.patch.object(packing, "SLAB", 64 * 64 * 4):
            for _ in range(4):
                x = torch.rand(64, 64)
                result = run([x])
                a = b = x
                for i in range(12):
                    a, b = b, torch.add(b, a, alpha=i)
                self.assertEqual(list(result), [b * a])
        (arrangement,) = self.device.arrangements
        self.assertEqual(arrangement.layout.scratch_size, 64 * 64 * 4)
        self.assertEqual([s.size for s in arrangement.layout.storages], [64 * 64 * 4] * 3)
        self.assertEqual(self.counted("relaunches"), 3)

    def test_little_scratch_is_not_planned(self):
        run = self.runner(CHAIN)
        for _ in range(3):
            run([torch.randn(64, 64)])
        self.assertEqual(self.device.arrangements[0].layout.scratch_size, 12 * 64 * 64 * 4)

    def test_temporary_that_somebody_keeps_is_refused(self):
        kept = []
        run = self.runner(CHAIN.replace("x = y\n", "x = y; keep(y)\n"), keep=kept.append)
        for _ in range(3):
            run([torch.randn(64, 64)])
        self.assertEqual(self.counted("relaunches"), 0)
        self.assertIn("[kept]", causes.refusals()[-1])

    def test_garbage_is_no_reason_to_refuse(self):
        run = self.runner(CHAIN.replace("x = y\n", "x = y; cycle = [y]; cycle.append(cycle); del cycle\n"))
        for _ in range(4):
            x = torch.randn(64, 64)
            self.assertEqual(run([x])[0], (x + sum(range(12))) * 2)
        self.assertEqual(self.counted("relaunches"), 3)


class TestStages(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        self.cut_into_stages(64 * 64 * 4)  # one gradient is as much as a stage must save

    def backward(self, source=BACKWARD, *, mutated=(9,), **options):
        return self.runner(source, mutated=mutated, is_backward=True, **options)

    def check(self, run, inputs=None):
        """Call a region of `BACKWARD` with these inputs, or new ones. Return its outputs."""
        inputs = backward_inputs() if inputs is None else inputs
        expected = backward_expected(inputs)
        result = run(inputs)
        self.assertEqual(list(result), expected)
        self.assertEqual(inputs, [])
        return result

    def warmed(self, **options):
        run = self.backward(**options)
        for _ in range(3):
            run(backward_inputs())
        return run

    def deferred(self, inputs):
        """The results of `DEFERRED`."""
        *saved, tangent = [v.clone() for v in inputs]
        flows = itertools.accumulate(reversed(saved), torch.add, initial=tangent)
        return [3 * d for d in [*flows][:0:-1]]

    def stages(self):
        return self.device.arrangements[-1].stages

    def test_only_the_end_of_a_large_input_matters(self):
        """Others are too little to cut a graph for, and to look for their ends takes time."""
        source = region("x, y", "z = x.sum() + y.sum()", "return (z,)")
        for size, held, dying in ((2, False, {0}), (2, True, ()), (1, False, ())):
            with mock.patch.object(runner, "LARGE", 8), self.subTest(size=size, held=held):
                run, x = self.backward(source, mutated=()), [torch.randn(size)]
                inputs = [x[0], torch.randn(1)]
                if not held:
                    x.clear()
                run(inputs)
                (state,) = run.states.values()
                self.assertEqual((state.plan.dying, state.plan.detail), (frozenset(dying), bool(dying)))

    def test_each_size_shows_which_inputs_it_frees(self):
        source = region("x, n", "return (x.sum() + n,)")
        with mock.patch.object(runner, "LARGE", 64), mock.patch.object(runner, "Watch", wraps=runner.Watch) as watched:
            run = self.backward(source, mutated=())
            held = torch.randn(20)
            for n, inputs in ((4, [torch.randn(4)]), (16, [torch.randn(16)]), (20, [held])):
                inputs.append(n)
                run(inputs)
        self.assertEqual([state.plan.dying for state in run.states.values()], [frozenset(), {0}, frozenset()])
        self.assertEqual([state.plan.detail for state in run.states.values()], [False, True, False])
        self.assertEqual(watched.call_count, 1, "to watch each operator takes longer than the run")

    def test_results_are_those_of_the_whole(self):
        for hazard, options in (
            ("all inputs move", {}),
            ("a static input moves", {"static": [8]}),
            ("verified", {"verify": True}),
        ):
            with self.subTest(hazard):
                counters.clear()
                run = self.backward(**options)
                run(backward_inputs())
                for _ in range(5):
                    inputs = backward_inputs()
                    held = inputs[9]
                    self.assertIs(self.check(run, inputs)[-2], held)
                self.assertEqual(isinstance(run.states[()].relaunch, Verified), "verify" in options)
                self.assertGreater(len(self.stages()), 2)
                self.assertEqual(self.counted("captures"), 1)
                self.assertEqual(self.counted("relaunches"), 5 * len(self.stages()))
                for stage in self.stages():  # scratch of one stage alone is passed to no other
                    self.assertTrue(set(stage.gives).isdisjoint(stage.drops))

    def test_backward_that_writes_over_what_was_saved(self):
        """One stage leaves there what a later one reads."""
        source = DEFERRED.replace("else tangent, out=new(64, 64))", "else tangent, out=a)")
        run = self.backward(source, mutated=())
        for _ in range(4):
            inputs = backward_inputs()[:9]
            expected = self.deferred(inputs)
            self.assertEqual(list(run(inputs)), expected)
        self.assertGreater(len(self.stages()), 1)
        self.assertEqual(self.counted("relaunches"), 3 * len(self.stages()))

    def test_backward_does_not_run_again_once_a_stage_has(self):
        """The stage may have written over what was saved."""
        self.enterContext(mock.patch.object(relaunch, "moving", lambda template: {"a copy"}))
        self.enterContext(mock.patch.object(Executable, "direct", False))
        run, launched = self.backward(DEFERRED, mutated=range(8)), []
        replay = Executable.replay

        def failing(executable):
            launched.append(executable)
            if len(launched) == 2:
                raise RuntimeError("no such copy")
            replay(executable)

        run(backward_inputs()[:9])
        with mock.patch.object(Executable, "replay", failing), self.assertRaisesRegex(RuntimeError, "no such copy"):
            run(backward_inputs()[:9])
        self.assertEqual(len(launched), 2)

    def test_copy_that_is_refused_at_a_later_launch(self):
        """The call has consumed its inputs, so it fails; all later ones run without a graph."""
        run = self.backward(DEFERRED, mutated=())
        for _ in range(3):
            run(backward_inputs()[:9])
        error = DriverError(COPY_SETTER, 1, "no such copy")
        (state,) = run.states.values()
        state.relaunch.launch = mock.Mock(side_effect=error)
        with self.assertRaisesRegex(DriverError, "no such copy"):
            run(backward_inputs()[:9])
        inputs = backward_inputs()[:9]
        self.assertEqual(list(run(list(inputs))), self.deferred(inputs))
        self.assertEqual((state.refused, state.relaunch), ("host-memory", None))

    def test_saved_inputs_are_freed_before_later_stages(self):
        run = self.warmed()
        inputs = backward_inputs()
        alive = [weakref.ref(v) for v in inputs[:8]]
        seen = []
        for stage in run.states[()].relaunch.steps:
            launch = stage[0].launch
            stage[0].launch = lambda given, launch=launch: (
                seen.append(sum(r() is not None for r in alive)),
                launch(given),
            )[1]
        run(inputs)
        self.assertEqual(seen, sorted(seen, reverse=True))
        self.assertLess(seen[-1], seen[0])
        self.assertEqual(seen[0], 8)

    def test_what_somebody_else_holds_stays_as_it_is(self):
        """A retained graph, or a hook that keeps a saved tensor; then backward again over the same."""
        run = self.backward()
        for _ in range(5):
            inputs = backward_inputs()
            copies = [v.clone() for v in inputs]
            first = run(list(inputs))
            self.assertEqual(inputs[:9], copies[:9])
            self.assertEqual(list(first), backward_expected(copies))
            copies[9] += 1
            self.assertEqual(list(run(list(inputs))), backward_expected(copies))
            copies[9] += 1
            self.assertEqual(inputs, copies)
            del first

    def test_no_garbage_is_looked_for(self):
        """Not even where inputs outlive the call: that takes as long as all the rest."""
        run = self.backward()
        inputs = backward_inputs()
        kept = inputs[:9]
        with mock.patch("gc.collect") as collect:
            run(inputs)
            run(backward_inputs())
        self.assertEqual(collect.call_count, 0)
        del kept

    def held_results(self, run):
        """Of six calls, all of which are right when the last one has run."""
        held = []
        for _ in range(6):
            inputs = backward_inputs()
            expected = backward_expected(inputs)
            held.append((run(inputs), expected))
        for result, expected in held:
            self.assertEqual(list(result[:9]), expected[:9])
        return [result for result, _ in held]

    def test_gradients_of_earlier_calls_stay(self):
        held = self.held_results(self.backward())
        addresses = [t.data_ptr() for result in held for t in result[:9]]
        self.assertEqual(len(set(addresses)), len(addresses))

    def test_pieces_of_the_same_stages_are_one_allocation(self):
        run = self.backward(DEFERRED, mutated=())
        for _ in range(6):
            inputs = backward_inputs()[:9]
            self.assertEqual(list(run(list(inputs))), self.deferred(inputs))
        stages = self.stages()
        self.assertGreater(len(stages), 1)
        crossing = [(k, slot) for k, stage in enumerate(stages) for slot in stage.gives if slot >= 9 + 8]
        ends = {slot: k for k, stage in enumerate(stages) for slot in stage.drops}
        pairs = [(k, ends[slot]) for k, slot in crossing]
        self.assertEqual(len(pairs), len(set(pairs)))
        self.assertGreater(len(pairs), 1, "each slab goes after the last stage of its pieces")
        sizes = [stages[k].layout.storages[stages[k].gives.index(slot)].size for k, slot in crossing]
        self.assertGreater(sum(sizes) // (64 * 64 * 4), len(pairs))
        self.assertEqual(self.counted("relaunches"), 5 * len(stages))

    def test_little_gradients_go_together(self):
        """A chunk of them is allocated by the stage that makes the first one; each output is a view at its place."""
        size = 64 * 64 * 4
        with mock.patch.object(outputs, "LITTLE", size), mock.patch.object(outputs, "LITTLE_CHUNK", 4 * size):
            held = self.held_results(self.backward())
        stages = self.stages()
        self.assertGreater(len(stages), 1)
        self.assertEqual(self.counted("relaunches"), 5 * len(stages))
        self.assertEqual(causes.refusals(), [])
        gradients = held[-1][:9]
        storages = [g.untyped_storage().data_ptr() for g in gradients]
        self.assertEqual(len(set(storages)), 3)
        self.assertEqual({g.untyped_storage().nbytes() for g in gradients}, {4 * size, size})
        made = [s.dtype for stage in stages for s in stage.layout.storages]
        self.assertEqual(made.count(torch.float32), 2)

    def test_gradients_that_are_returned_again_and_views(self):
        """One tensor as the gradient of two, and views of a gradient's memory."""
        again = "return (gradients[0], *gradients, gradients[0], total, total[1:], total.t(), held, held, 7)"
        for little in (0, 64 * 64 * 4):
            run = self.backward(BACKWARD.replace("return (*gradients, total, held, 7)", again))
            with mock.patch.object(outputs, "LITTLE", little):
                for _ in range(5):
                    inputs = backward_inputs()
                    *gradients, total, held, number = backward_expected(inputs)
                    result = run(inputs)
                    expected = [gradients[0], *gradients, gradients[0], total, total[1:], total.t(), held, held, number]
                    self.assertEqual(list(result), expected)
                    self.assertIs(result[0], result[1])
                    self.assertIs(result[0], result[9])
                    self.assertIs(result[-3], result[-2])
                    self.assertEqual(result[10].data_ptr(), result[12].data_ptr())
            self.assertGreater(len(self.stages()), 1)
        self.assertEqual(causes.refusals(), [])

    def test_little_gradients_that_share_a_chunk_are_apart(self):
        run = self.backward()
        with mock.patch.object(outputs, "LITTLE", 64 * 64 * 4):
            for _ in range(3):
                *gradients, total, _, _ = run(backward_inputs())
        copies = [g.clone() for g in gradients]
        version = total._version
        total.zero_()
        self.assertEqual(gradients, copies)
        self.assertEqual([g._version for g in gradients], [version] * 8)

    def test_inputs_in_one_chunk(self):
        run = self.backward()
        for _ in range(5):
            slab = torch.randn(8, 64, 64)
            inputs = [*slab.unbind(), torch.randn(64, 64), torch.randn(64, 64)]
            del slab
            self.check(run, inputs)

    def test_inputs_in_one_piece_are_not_worth_stages(self):
        run = self.backward()
        for _ in range(3):
            slab = torch.randn(8, 64, 64)
            with mock.patch.object(arrange, "GAIN", 12 * 64 * 64 * 4):
                run([*slab.unbind(), torch.randn(64, 64), torch.randn(64, 64)])
        self.assertEqual(self.stages(), ())

    def test_misaligned_input_is_found_before_the_first_stage(self):
        run = self.warmed()
        for _ in range(3):
            inputs = backward_inputs()
            inputs[0] = torch.empty(64 * 64 + 1)[1:].view(64, 64).copy_(inputs[0])  # of the last stage
            self.check(run, inputs)

    def test_inputs_that_somebody_else_holds_are_not_freed(self):
        """Then stages save little."""
        for is_held in (False, True):
            run, held = self.backward(), []
            with mock.patch.object(arrange, "GAIN", 3 * 64 * 64 * 4):
                for _ in range(3):
                    inputs = backward_inputs()
                    held += inputs[:8] if is_held else ()
                    run(inputs)
            self.assertEqual(bool(self.stages()), not is_held)

    def needs(self):
        """The arguments of what is asked about a region while it is arranged."""
        with mock.patch.object(arrange, "need_of", wraps=arrange.need_of) as need_of:
            self.warmed()
        return [call.args for call in need_of.mock_calls]

    def test_outputs_are_held_to_the_end(self):
        held, _, length = self.needs()[0]
        self.assertEqual({h.last for h in held if h.first and not h.slab}, {length})

    def test_stages_save_no_less_than_the_gain(self):
        at_once, cut = [arrange.need_of(*asked) for asked in self.needs()]
        for more, are_cut in ((0, True), (1, False)):
            with mock.patch.object(arrange, "GAIN", at_once - cut + more):
                self.warmed()
            self.assertEqual(bool(self.stages()), are_cut)

    def test_no_memory_in_the_middle(self):
        run = self.warmed()
        last = run.states[()].relaunch.steps[-1][0]
        full = mock.patch.object(last, "launch", side_effect=torch.OutOfMemoryError("no memory"))
        with full, self.assertRaises(torch.OutOfMemoryError):
            run(backward_inputs())
        self.check(run)

    def test_forward_stays_whole(self):
        run = self.runner(BACKWARD, mutated=[9])
        for _ in range(3):
            run(backward_inputs())
        self.assertEqual(self.stages(), ())

    def test_executables_go_with_the_region(self):
        run = self.warmed()
        self.assertEqual([stage.totals[0] for stage in run.states[()].relaunch.stages], [2] * len(self.stages()))
        refs = [weakref.ref(executable) for executable in self.device.executables]
        self.device.executables.clear()
        run.forget()
        self.assertEqual([r() for r in refs], [None] * len(refs))


def vector(storage, bytes_, dtype=torch.float32, offset=0):
    return OfStorage(storage, TensorView((bytes_ // dtype.itemsize,), (1,), dtype, offset))


class TestChunks(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(outputs, "CHUNK", 4096))

    def test_little_is_one_slab(self):
        recipes = [vector(0, 1024), vector(1, 1024)]
        moved, storages, places = place(recipes, [1024, 1024], frozenset([0, 1]), [0, 1])
        self.assertEqual(storages, (Storage(2048, torch.uint8, (0, 1024)),))
        self.assertEqual((list(moved), places), ([recipes[0], vector(0, 1024, offset=1024)], ((0, 0), (0, 1024))))

    def test_much_lies_in_chunks_in_the_order_of_the_forward(self):
        sizes = [1024] * 16
        recipes = [vector(i, 1024) for i in range(16)]
        moved, storages, places = place(recipes, sizes, frozenset(range(16)), list(reversed(range(16))))
        chunks = {}
        for i, (number, offset) in enumerate(places):
            chunks.setdefault(number, []).append((offset, i))
        self.assertEqual([len(members) for members in chunks.values()], [4] * 4)
        for members in chunks.values():
            self.assertEqual(sorted(offset for offset, _ in members), [0, 1024, 2048, 3072])
            numbers = [i for _, i in members]
            self.assertEqual(max(numbers) - min(numbers), 3, "neighbours in the forward")
        self.assertEqual([r.view.offset for r in moved], [offset for _, offset in places])
        self.assertEqual({s.size for s in storages}, {4096})
        self.assertEqual({s.dtype for s in storages}, {torch.float32})

    def test_chunks_find_their_place_in_the_segments_of_the_allocator(self):
        count = 1000
        recipes = [vector(i, 1024) for i in range(count)]
        _, storages, _ = place(recipes, [1024] * count, frozenset(range(count)), range(count))
        own = [s for s in storages if s.dtype is not torch.uint8]
        self.assertEqual({s.size for s in own[:-1]}, {4096})
        self.assertLessEqual(own[-1].size, 4096)

    def with_holes(self, sizes, *holes):
        """Storages and places of vectors of these sizes, all of them saved."""
        recipes, count = [vector(i, size) for i, size in enumerate(sizes)], len(sizes)
        with mock.patch.object(outputs, "HOLE", 1024):
            return place(recipes, sizes, frozenset(range(count)), range(count), holes=list(holes))[1:]

    def test_holes_are_filled_first(self):
        storages, places = self.with_holes([1024] * 16, 1536, 1023, 2048, 4096 + 1000)
        self.assertEqual(sorted(s.size for s in storages), [1024, 1024, 2048, 4096, 4096, 4096])
        (pair,) = [number for number, s in enumerate(storages) if s.size == 2048]
        first, second = [i for i, (number, _) in enumerate(places) if number == pair]
        self.assertEqual(second - first, 1, "neighbours in the forward")

    def test_large_hole_takes_several_chunks(self):
        storages, _ = self.with_holes([1024] * 16, 2 * 4096 + 3072)
        self.assertEqual(sorted(s.size for s in storages), [1024, 3072, 4096, 4096, 4096])

    def test_hole_takes_the_neighbours_that_fill_most_of_it(self):
        storages, places = self.with_holes([4096, 1024, 1536, 512, 2560, 4096, 4096], 2048)
        (hole,) = [number for number, s in enumerate(storages) if s.size == 2048]
        self.assertEqual([i for i, (number, _) in enumerate(places) if number == hole], [2, 3])

    @settings(deadline=None, max_examples=200)
    @given(
        st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=40),
        st.lists(st.integers(1, 20), max_size=12),
    )
    def test_nothing_is_lost_in_holes(self, rows, holes):
        sizes = [512 * size for size, _ in rows]
        recipes = [vector(i, 512 * n, torch.float16 if half else torch.float32) for i, (n, half) in enumerate(rows)]
        every, holes = range(len(rows)), [512 * hole for hole in holes]
        with mock.patch.object(outputs, "HOLE", 512):
            moved, storages, places = place(recipes, sizes, frozenset(every), every, holes=holes)
        self.assertEqual(sum(s.size for s in storages), sum(sizes))
        taken = sorted((number, offset, offset + size) for (number, offset), size in zip(places, sizes, strict=True))
        for before, after in itertools.pairwise(taken):
            self.assertTrue(before[0] < after[0] or before[2] <= after[1], (before, after))
        for recipe, original, (number, offset) in zip(moved, recipes, places, strict=True):
            self.assertEqual(recipe.view, dataclasses.replace(original.view, offset=offset))
            is_slab = storages[number].dtype is torch.uint8
            self.assertTrue(is_slab or storages[number].dtype in (None, original.view.dtype))
            self.assertLessEqual(storages[number].size, 2 * 4096 if is_slab else max(4096, *sizes))

    def test_each_chunk_has_one_type_and_small_things_go_together(self):
        recipes = [vector(i, 2048, torch.bfloat16 if i % 2 else torch.float32) for i in range(16)]
        recipes += [vector(16, 16, torch.int64), vector(17, 16, torch.uint8)]
        sizes = [2048] * 16 + [16] * 2
        _, storages, places = place(recipes, sizes, frozenset(range(18)), range(18))
        for recipe, (number, _) in zip(recipes, places):
            if storages[number].dtype not in (None, torch.uint8):
                self.assertEqual(storages[number].dtype, recipe.view.dtype)
        self.assertIs(storages[places[16][0]].dtype, torch.uint8)

    def test_little_gradients(self):
        sizes = [1024, 64, 64, 1024, 4096, 1024, 1024, 1024]
        recipes = [vector(i, size, torch.bfloat16 if size == 64 else torch.float32) for i, size in enumerate(sizes)]
        limits = mock.patch.object(outputs, "LITTLE", 1024), mock.patch.object(outputs, "LITTLE_CHUNK", 2048)
        with limits[0], limits[1]:
            moved, storages, places = place(recipes, sizes, frozenset(), [0, 1, 2, 7, 4, 5, 6, 3], gradients=True)
            alone = place(recipes, sizes, frozenset(), range(8))[1]
        self.assertEqual([s.dtype for s in alone], [None] * 8)
        self.assertEqual(places[0][0], places[7][0], "neighbours in the backward")
        self.assertEqual(places[1][0], places[2][0])
        self.assertEqual((places[1][1], places[2][1]), (0, 512))
        self.assertEqual(places[5][0], places[6][0])
        self.assertEqual([(s.size, s.dtype) for s in storages if s.dtype is None], [(1024, None), (4096, None)])
        self.assertEqual([r.view.offset for r in moved], [offset for _, offset in places])

    def test_what_the_user_sees_is_by_itself(self):
        recipes = [vector(0, 65536), vector(1, 65536), vector(2, 65536), Repeated(2), Given(5)]
        saved = frozenset([1, 2])  # output 3 is output 2, and the user's
        _, storages, _ = place(recipes, [65536] * 3, saved, range(3))
        self.assertEqual([s.dtype for s in storages], [None] * 3)

    def test_two_types_of_one_storage(self):
        recipes = [vector(0, 8192), vector(0, 8192, torch.int32), vector(1, 8192), vector(2, 8192)]
        _, storages, places = place(recipes, [8192] * 3, frozenset(range(4)), range(3))
        self.assertIs(storages[places[0][0]].dtype, torch.uint8)


class TestHoles(unittest.TestCase):
    def test_what_an_allocation_may_be_given(self):
        def segment(*blocks, **changed):
            """Sizes in MiB, negative where they are in use."""
            listed = [{"size": abs(n) << 20, "state": "active_allocated" if n < 0 else "inactive"} for n in blocks]
            plain = {"device": 0, "stream": 7, "segment_pool_id": (0, 0), "segment_type": "large"}
            return {**plain, "total_size": sum(b["size"] for b in listed), "blocks": listed, **changed}

        segments = [
            segment(-3, 5, -4, 8),
            segment(20),
            segment(198),  # another logits' place
            segment(-1, 197),
            segment(6, device=1),
            segment(6, stream=8),
            segment(6, segment_pool_id=(0, 3)),
            segment(1, -1, segment_type="small"),
        ]
        device = Cuda(0)
        device.stream_of = lambda index: 7
        with mock.patch.object(torch.cuda, "memory_snapshot", lambda **options: segments):
            self.assertEqual(device.holes(), [n << 20 for n in (5, 8, 20, 197)])


class TestChunksOfARegion(RelaunchTestCase):
    SOURCE = """
def region(args):
    x, = args
    args.clear()
    made = []
    for i in range(12):
        made.append(torch.add(x, i, out=new(32, 32)))
        made.append(torch.mul(x[:, :16], 1.0, out=new(32, 16, dtype=torch.float64)))
    return tuple(made)
"""

    def check(self, out, x):
        for i, value in enumerate(out):
            self.assertEqual(value, x[:, :16].double() if i % 2 else x + i // 2)

    def call(self, run):
        x = torch.randn(32, 32)
        out = run([x])
        self.check(out, x)
        return out, x

    def test_saved_outputs_keep_no_more_than_their_chunk(self):
        with mock.patch.object(outputs, "CHUNK", 16384):
            run = self.runner(self.SOURCE, saved=range(1, 24))
            held = [self.call(run) for _ in range(5)]
        for out, x in held:
            self.check(out, x)
        out = held[-1][0]
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in out}
        self.assertLess(len(storages), 10)
        self.assertGreater(len(storages), 3)
        self.assertLessEqual(max(storages.values()), 16384)
        self.assertEqual(out[0].untyped_storage().nbytes(), 4096, "the user's own output is by itself")
        self.assertEqual(counters["torch_overlay"]["cudagraph_captures"], 1)

    def test_holes_of_the_allocator(self):
        """What is free when the region is captured decides what lies together."""
        self.device.free_blocks = [8192] * 3
        with mock.patch.object(outputs, "CHUNK", 16384), mock.patch.object(outputs, "HOLE", 4096):
            run = self.runner(self.SOURCE, saved=range(1, 24))
            out = [self.call(run) for _ in range(5)][-1][0]
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in out[1:]}
        self.assertGreaterEqual(list(storages.values()).count(8192), 3)
        self.assertEqual(counters["torch_overlay"]["cudagraph_captures"], 1)


class TestDonation(unittest.TestCase):
    """Compiled code that writes a gradient over what was saved would keep the chunk alive with it."""

    def backward(self, saved, returned, dynamic):
        mode, graph = FakeTensorMode(shape_env=ShapeEnv()), torch.fx.Graph()

        def noted(node, size, dtype, device="cuda"):
            dims = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC] * len(size)
            given = torch.empty(size, dtype=dtype, device="meta")
            context = StatelessSymbolicContext(dims)
            value = mode.from_tensor(given, source=ConstantSource(node.name), symbolic_context=context)
            with mode:
                node.meta["val"] = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=device)
            return node

        inputs = [noted(graph.placeholder(f"saved_{i}"), *each) for i, each in enumerate(saved)]
        graph.output((*[noted(graph.call_function(torch.relu, (inputs[0],)), *each) for each in returned], None))
        return torch.fx.GraphModule({}, graph)

    def donated(self, mode, graphs, saved, returned, dynamic=False):
        module = self.backward(saved, returned, dynamic)
        with config.patch(cudagraphs=mode), inductor_config.patch({"triton.cudagraphs": graphs}):
            return collect_bw_donated_buffer_idxs(lambda *args: list(range(len(saved))), module, module, None)

    SAVED = ((4, 6), torch.float32), ((8, 3), torch.float32), ((4, 6), torch.float16), ((), torch.float32, "cpu")

    def test_memory_that_a_gradient_could_take_is_not_donated(self):
        """It may take that of another shape, but not of another type. Nothing in host memory is donated."""
        gradient = ((2, 12), torch.float32)
        for dynamic in (False, True):
            self.assertEqual(self.donated("relaunch", True, self.SAVED, [gradient], dynamic), [2])
            self.assertEqual(self.donated("relaunch", True, self.SAVED, [], dynamic), [0, 1, 2])

    def test_all_others_are_as_they_were(self):
        gradient = ((2, 12), torch.float32)
        self.assertEqual(self.donated("relaunch", False, self.SAVED, [gradient]), [0, 1, 2, 3])
        self.assertEqual(self.donated("trees", True, self.SAVED, [gradient]), [0, 1, 2, 3])

    def test_backward_writes_over_what_was_saved_unless_it_returns_something_of_that_size(self):
        def writes_over(rows, columns, mode="relaunch"):
            """Whether the gradient of tanh lies over its result, which is the memory that a gradient could take."""
            torch._dynamo.reset()
            function = torch.compile(lambda x, w: (x @ w).tanh().sum())
            with config.patch(cudagraphs=mode), inductor_config.patch({"triton.cudagraphs": True}), simulated_gpu():
                x, w = torch.randn(8, rows, device="cuda"), torch.randn(rows, columns, device="cuda")
                texts = run_and_get_code(lambda: function(x.requires_grad_(), w).backward())[1]
            return "in_out_ptr0" in texts[-1]

        self.assertTrue(writes_over(16, 64))
        self.assertFalse(writes_over(64, 64))  # it returns the gradient of x, which is as large
        self.assertTrue(writes_over(64, 64, "off"))

    def test_code_is_said_to_write_over_it(self):
        found = []

        def wrap(model, code, *_, **__):
            found.append(code)
            return model

        for partitioned in (False, True):
            torch._dynamo.reset()
            options = {"triton.cudagraphs": True, "graph_partition": partitioned}
            with inductor_config.patch(options), mock.patch.object(policy, "_wrap", wrap), simulated_gpu():
                x, w = torch.randn(8, 16, device="cuda"), torch.randn(16, 64, device="cuda", requires_grad=True)
                torch.compile(lambda x, w: (x @ w).tanh().sum())(x, w).backward()
            forward, backward = found[-2:]
            self.assertEqual(forward.mutated_inputs, ())
            self.assertEqual(len(backward.static_inputs), 2)  # what was saved: an input, and the result of tanh
            self.assertEqual(len(backward.mutated_inputs), 1)
            self.assertIn(*backward.mutated_inputs, backward.static_inputs)


del RelaunchTestCase  # it has no tests of its own


class TestWhatPoolsKeep(unittest.TestCase):
    def kept(self, pools):
        """Sizes of what is in use in these pools, and how many snapshots that took."""
        used, free = ({"size": size, "state": state} for size, state in ((512, "active_allocated"), (8, "inactive")))
        segments = {(0, n): [{"blocks": [used, free] if n % 2 else [free]}] for n in range(50)}

        def snapshot(pool, include_traces=True):
            self.assertFalse(include_traces)
            return segments[pool]

        recording = object.__new__(Recording)
        recording._used, recording.owner = pools, SimpleNamespace(is_unused=lambda pool: pool[1] % 2 == 0)
        with mock.patch.object(torch.cuda, "memory_snapshot", side_effect=snapshot) as taken:
            return recording._in_use(), taken.call_count

    def test_only_pools_in_use_have_a_snapshot(self):
        self.assertEqual(self.kept([(0, 4), (0, 7), (0, 9), (0, 7)]), ([512, 512], 2))
        self.assertEqual(self.kept([(0, 4), (0, 8)]), ([], 0))
        self.assertEqual(self.kept([]), ([], 0))


class TestStatisticsOfPools(unittest.TestCase):
    def test_pools_of_captures_that_hold_nothing_are_left_out(self):
        def pool(current):
            return {"all": {"current": current, "peak": 7}}

        stats = {"segment": 1, "reserved_bytes_by_private_pools": {(0, 1): pool(0), (0, 2): pool(0), (0, 3): pool(8)}}
        with (
            mock.patch.object(recording, "pools_made", {(0, 2), (0, 3), (0, 4)}),
            mock.patch.object(torch.cuda.memory, "is_initialized", lambda: True),
            mock.patch.object(torch._C, "_cuda_memoryStats", lambda index: stats),
        ):
            found = torch.cuda.memory.memory_stats_as_nested_dict(0)
            left = {name for name in torch.cuda.memory_stats(0) if name.startswith("reserved_bytes_by")}
        self.assertEqual(found["segment"], 1)
        self.assertEqual(list(found["reserved_bytes_by_private_pools"]), [(0, 1), (0, 3)])
        self.assertEqual({name.split(".")[1] for name in left}, {"0_1", "0_3"})

    def test_process_without_statistics(self):
        with mock.patch.object(torch.cuda.memory, "is_initialized", lambda: False):
            self.assertEqual(torch.cuda.memory_stats(), {})
