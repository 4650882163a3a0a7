"""`_inductor.streams.alignment`: copies of misaligned inputs, by stream."""

from types import SimpleNamespace

import torch
from torch._inductor.virtualized import V

import form  # noqa: F401
from stand_ins.schedules import ProgramCase
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.tokens import state
from torch_overlay._inductor.scheduler_nodes import stream_operation
from torch_overlay._inductor.streams.alignment import AlignedInputs, left_to_runtime, named_inputs, returned_inputs
from torch_overlay._inductor.streams.planned_region import plan_region
from torch_overlay._inductor.streams.region_names import RegionNames


aten, streams = torch.ops.aten, torch.ops.streams


class Emitter:
    def __init__(self, scheduler):
        self.scheduler, self.lines = scheduler, []
        self.region = plan_region(scheduler, scheduler.nodes, False)
        self.plan = self.region.plan
        self.wrapper = self.root = V.graph.wrapper_code
        self.wrapper.writeline = self.write

    def stream(self, stream):
        return f"stream{stream}"

    stream_of_call = stream
    require = RegionNames.require

    def write(self, text):
        self.lines.append(text)


class AlignmentTestCase(ProgramCase):
    facts = {"after": (), "promised_to": ()}

    def setUp(self):
        super().setUp()
        self.x, self.y = (self.program.input(4, 4) for _ in "xy")
        self.originals = []

    def write(self, value, stream=0):
        """Copy a value into x, on a stream."""
        return self.call(aten.copy_.default, self.x, value, stream=stream)

    def begin(self, *results):
        """Begin to write a region, whose inputs' alignment is checked."""
        self.scheduler = self.enterContext(self.program.scheduled(*results))
        V.graph.inputs_to_check = range(len(self.program.inputs))
        names = V.graph.graph_input_names
        written = V.graph.mutated_inputs
        V.graph.mutated_input_idxs = [i for i, n in enumerate(names) if n in written]
        self.emitter = Emitter(self.scheduler)
        self.wrapper = self.emitter.wrapper
        self.wrapper._pending_alignment_copies = set(names)
        self.aligned = AlignedInputs(self.emitter)

    def lines(self):
        found = list(self.emitter.lines)
        self.emitter.lines.clear()
        return found

    def node(self, index, number=0):
        """Write the copies of a node; `number` is upstream's, of its stream."""

        def copy_read(names, number):
            self.originals.append((set(names), number))

        self.aligned.copy(copy_read, self.scheduler.nodes[index], number)
        found = self.lines()
        self.aligned.write_back()
        return found, self.lines()


class TestCopies(AlignmentTestCase):
    def test_inputs_that_are_only_read(self):
        self.begin(self.call(aten.mm.default, self.x, self.y))
        self.assertEqual(self.node(0), ([], []))
        self.assertEqual(self.originals, [({"x0", "x1"}, 0)])
        self.assertEqual(left_to_runtime(V.graph, [0, 1]), [0, 1])

    def test_input_that_is_written(self):
        made = self.call(aten.mm.default, self.y, self.y)
        self.begin(self.write(made))
        self.assertEqual(self.node(0), ([], []))
        copies = ["x0_orig = x0", "x0 = aligned(x0_orig)"]
        back = ["if x0 is not x0_orig: write_back(x0_orig, x0)"]
        self.assertEqual(self.node(1), (copies, back))
        self.assertNotIn("x0", self.originals[1][0])
        self.assertEqual(left_to_runtime(V.graph, [0, 1]), [1])
        code = self.wrapper.imports.getvalue().splitlines()[-1]
        names = {}
        exec(code, names)
        self.assertLess({"aligned", "write_back"}, names.keys())

    def test_side_stream(self):
        tokens = {"after": (state(0),), "promised_to": (state(0),)}
        made = self.call(aten.mm.default, self.y, self.y, stream=1, **tokens)
        node = self.write(made, stream=1)
        note_fact(node, **tokens)
        self.begin(node)
        self.node(0, 1)
        copies = ["x0_orig = x0", "x0 = aligned(x0_orig, stream1)"]
        back = ["if x0 is not x0_orig: write_back(x0_orig, x0, stream1)"]
        self.assertEqual(self.node(1, 1), (copies, back))

    def test_another_stream_copies_again(self):
        made = self.call(aten.mm.default, self.y, self.y)
        written = self.write(made)
        self.begin(self.call(aten.mm.default, written, self.y, stream=1))
        self.node(0)
        self.node(1)
        self.assertEqual(self.node(2, 1), (["x0 = aligned(x0_orig, stream1)"], []))
        self.assertEqual(self.node(2, 1), ([], []))  # its stream has one

    def test_layout_of_a_tensor(self):
        self.begin(self.call(aten.new_empty.default, self.x, [4]))
        node = SimpleNamespace(op_overload=aten.randn_like.default)
        self.scheduler.nodes[0].node = node
        self.assertEqual(self.node(0), ([], []))
        self.assertEqual(self.originals, [])

    def test_operations_of_the_stream_program(self):
        made = self.call(aten.mm.default, self.y, self.y)
        self.call(streams.record_stream.default, self.x, 1)
        self.begin(made)
        kinds = list(map(stream_operation, self.scheduler.nodes))
        index = kinds.index(streams.record_stream.default)
        self.assertEqual(named_inputs(self.scheduler), {"x0"})
        self.node(index)
        self.assertEqual(self.originals, [])

    def test_copies_by_stream(self):
        """Upstream makes one for each stream of what is recorded, or read on another."""
        node = self.call(aten.mm.default, self.x, self.y)
        self.call(streams.record_stream.default, self.x, 1)
        self.begin(node)
        index = list(map(stream_operation, self.scheduler.nodes)).index(None)
        self.node(index)
        self.assertEqual(self.wrapper._multistream_alignment_copies, {"x0"})
        self.node(index, 1)
        self.assertEqual(self.wrapper._multistream_alignment_copies, {"x0", "x1"})


class TestExit(AlignmentTestCase):
    def leave(self, *results, goes_on=False):
        self.begin(*results)
        for name, number in (("x0", 1), ("x1", 0)):
            self.wrapper._alignment_aligned_stream[name] = number
            self.wrapper._alignment_orig_saved.add(name)
        self.aligned.leave(goes_on)
        return self.lines()

    def test_inputs_that_are_returned(self):
        view = self.call(aten.slice.Tensor, self.x, 0, 0, 2)
        made = self.call(aten.sin.default, self.x)
        self.begin(view, self.y, made)
        self.assertEqual(returned_inputs(), ({"x1"}, {"x0"}))

    def test_names_are_the_callers_tensors_again(self):
        self.assertEqual(self.leave(self.y), ["x1 = x1_orig; del x1_orig"])
        self.assertEqual(set(self.wrapper._alignment_aligned_stream), {"x0"})

    def test_view_of_a_side_streams_copy(self):
        found = self.leave(self.call(aten.slice.Tensor, self.x, 0, 0, 2))
        wanted = "if x0 is not x0_orig: x0.record_stream(stream0)"
        self.assertEqual(found, [wanted])

    def test_region_of_several(self):
        found = self.leave(self.call(aten.sin.default, self.x), goes_on=True)
        self.assertEqual(found, [f"x{i} = x{i}_orig; del x{i}_orig" for i in (0, 1)])
        self.assertEqual(self.wrapper._alignment_orig_saved, set())
