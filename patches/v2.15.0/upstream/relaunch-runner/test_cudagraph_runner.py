# Owner(s): ["module: inductor"]

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_relaunch import (
    alignment,
    attention_seeds,
    capture as captures,
    memcpy_nodes,
    refusals,
    region_graphs,
    runner as module,
)
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.launcher import ByNode
from torch._inductor.cudagraph_relaunch.make_graph import capturing
from torch._inductor.cudagraph_relaunch.native_call import Misaligned
from torch._inductor.cudagraph_relaunch.runner import Runner
from torch._inductor.cudagraph_relaunch.traced import Escaped
from torch.testing._internal.common_utils import run_tests, TestCase


NOT_SET = RuntimeError("cuGraphExecKernelNodeSetParams: not supported")


class Device:
    index, captures, prepared = 0, False, 0
    device = torch.device("cpu")
    guard = contextlib.nullcontext

    def current(self):
        return 0

    def is_capturing(self):
        return self.captures

    def prepare(self):
        self.prepared += 1

    def generators(self, inputs):
        return []

    def allocated(self):
        return (0, 0)


class Graph:
    """What launches a graph: `result` is what a launch returns, or raises."""

    attempt = call = None

    def __init__(self, result="launched"):
        self.result, self.inputs = result, []
        self.launcher = SimpleNamespace(nodes=5, shared=None)
        self.layout, self.template = SimpleNamespace(scratch_size=0), "a template"
        self.totals = [0, 0]

    def forget(self):
        pass

    def launch(self, inputs, originals=None):
        if inputs[0].data_ptr() % 16:
            raise Misaligned
        self.inputs.append(list(inputs))
        if isinstance(self.result, Exception):
            raise self.result
        self.totals[0] += 1
        inputs.clear()
        return self.result


class RunnerTestCase(TestCase):
    """Tensors of floating point numbers stand for those on the device."""

    def setUp(self):
        super().setUp()
        self.enterContext(
            mock.patch.object(
                captures,
                "is_region",
                lambda v: isinstance(v, torch.Tensor) and v.is_floating_point(),
            )
        )
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        # Memory of the host is aligned in any way.
        self.enterContext(mock.patch.object(alignment, "FULL", alignment.LEAST))
        self.enterContext(mock.patch.object(region_graphs.split_off, "failed", dict))
        self.copies = self.enterContext(
            mock.patch.object(memcpy_nodes, "moving", return_value=[])
        )
        self.make = self.enterContext(mock.patch.object(region_graphs, "make_or_blame"))
        self.graphs = []
        self.make.side_effect = lambda work: self.graphs[-1]
        self.device, self.calls = Device(), []
        self.run_ = self.new()

    def new(self, graph=None, numbers=(), **options):
        self.graphs.append(graph or Graph())

        def model(inputs):
            self.calls.append(list(inputs))
            inputs.clear()
            return ("compiled",)

        with inductor_config.patch(options):
            code = Code("a region", 0, numbers=frozenset(numbers))
            return Runner(model, code, self.device)

    def results(self, *calls, run=None):
        found = []
        for inputs in calls:
            result = (run or self.run_)([torch.zeros(4), *inputs])
            found.append(result if isinstance(result, str) else result[0])
        return found

    def said(self):
        return [each.reason for each in refusals.refused()]


RUN, LAUNCH = "compiled", "launched"


class TestCalls(RunnerTestCase):
    def test_first_calls(self):
        found = self.results((), (), ())
        self.assertEqual(found, [RUN, LAUNCH, LAUNCH])
        self.assertEqual(self.make.call_count, 1)
        self.assertEqual((self.run_.launched(), self.device.prepared), (2, 1))
        self.assertEqual(self.run_.outside, {"warm-up": 1})
        self.assertEqual([each.nodes for each in self.run_.graphs()], [5])

    def test_each_number_has_a_graph(self):
        self.enterContext(mock.patch.object(self.run_.any_size, "run", lambda *a: None))
        calls = [(3,), (4,), (3,), (4,), (3,), (3.0,)]
        found = self.results(*calls)
        self.assertEqual(found, [RUN, RUN, LAUNCH, LAUNCH, LAUNCH, RUN])
        self.assertEqual(self.make.call_count, 2)
        self.assertEqual(list(self.run_.states)[-2][0], 3)  # the least recent is first

    def test_another_thread(self):
        self.results((), ())
        self.run_.states[()].relaunch = None
        found = []
        thread = threading.Thread(target=lambda: found.extend(self.results((), ())))
        thread.start()
        thread.join()
        self.assertEqual(found, [RUN, LAUNCH])

    def test_launch_in_one_call(self):
        graph = Graph()
        self.graphs.append(graph)
        results = [None, None, "in C"]
        graph.attempt = lambda inputs: results.pop()
        found = self.results((), (), (), ())
        self.assertEqual(found, [RUN, LAUNCH, "in C", LAUNCH])
        self.assertEqual(len(graph.inputs), 2)

    def test_capture_of_the_callers(self):
        self.results((), ())
        self.device.captures = True
        self.assertEqual(self.results((), ()), [RUN, RUN])
        self.assertEqual(self.run_.outside["callers-capture"], 2)

    def test_another_thread_captures(self):
        self.results(())
        with capturing:
            self.assertEqual(self.results(()), [RUN])
        self.assertEqual(self.run_.outside["busy"], 1)
        self.assertEqual(self.results(()), [LAUNCH])

    def test_reset(self):
        self.results((), ())
        torch._dynamo.reset()
        self.assertEqual((self.run_.launched(), len(self.run_.states)), (1, 0))
        self.assertEqual(self.results((), ()), [RUN, LAUNCH])
        self.assertEqual(self.make.call_count, 2)

    def test_sizes(self):
        self.assertEqual(self.run_.describe_sizes(), "")
        with mock.patch.object(self.run_.any_size, "run", return_value="of any size"):
            self.assertEqual(self.results((3,)), ["of any size"])
        self.assertEqual(self.calls, [])


class TestNumbers(RunnerTestCase):
    def test_parameter(self):
        run = self.new(numbers=[1])
        found = self.results((0.1,), (0.2,), (0.3,), run=run)
        self.assertEqual(found, [RUN, LAUNCH, LAUNCH])
        self.assertEqual(self.make.call_args.args[0].numbers, {1: 0.2})

    def test_number_that_has_to_be_in_the_key(self):
        run, graph = self.new(numbers=[1]), self.graphs[-1]
        self.make.side_effect = [Escaped(frozenset([1]), "a decision"), graph]
        found = self.results((1.0,), (2.0,), (2.0,), (1.0,), run=run)
        self.assertEqual(found, [RUN, RUN, LAUNCH, RUN])
        self.assertEqual((run.keys.kept, run.keys.keyed), ({1: "a decision"}, (1,)))

    def test_number_that_no_parameter_holds(self):
        self.results((), ())
        self.graphs[-1].result = Misaligned()
        self.assertEqual(self.results(()), [RUN])
        self.assertEqual(self.run_.outside["number"], 1)
        self.assertEqual(self.calls[-1][0].shape, (4,))

    def test_numbers_that_never_come_again(self):
        run = self.new(**{"triton.cudagraph_templates": 1})
        with mock.patch.object(run.any_size, "run", lambda *args: None):
            found = self.results(*((n,) for n in range(8)), run=run)
            self.assertEqual(found, [RUN] * 8)
            self.assertEqual(run.outside, {"warm-up": 4, "first-calls": 4})
            self.assertEqual(self.said(), ["first-calls"])
            found = self.results((7,), (7,), run=run)
        self.assertEqual(found, [RUN, LAUNCH])

    def test_too_many_graphs(self):
        run = self.new(**{"triton.cudagraph_templates": 1})
        with mock.patch.object(run.any_size, "run", lambda *args: None):
            found = self.results(*((n // 2,) for n in range(10)), run=run)
        self.assertEqual(found, [RUN, LAUNCH] * 4 + [RUN, RUN])
        self.assertEqual((run.outside["templates"], self.said()), (2, ["templates"]))


class TestInputs(RunnerTestCase):
    def test_large_tensor_on_the_host(self):
        for _ in range(2):
            self.assertEqual(self.results((torch.arange(9),)), [RUN])
        (refused,) = refusals.refused()
        self.assertEqual(refused.reason, "host-tensor")
        self.assertIn("input 1 is a tensor of 9 values in host memory", str(refused))
        self.assertEqual(self.run_.outside, {"host-tensor": 2})

    def test_less_aligned_input(self):
        memory = torch.zeros(64)
        start = -memory.data_ptr() // 4 % 16
        first = memory[start:]
        for skew in (0, 0, 1):
            self.run_([first[skew : skew + 4]])
        ((x,),) = self.graphs[-1].inputs[-1:]
        self.assertEqual(x.data_ptr() % 16, 0)  # a copy
        self.assertEqual(self.run_.launched(), 2)

    def test_seeds(self):
        """A seed is in no key once a run has shown that it is one."""
        seed = torch.tensor(7)

        def noting(inputs):
            attention_seeds._thread.noted.add(inputs[1].data_ptr())
            return ("compiled",)

        self.run_.region.model = noting
        self.assertEqual(self.results((seed, 3)), [RUN])
        self.assertEqual((self.run_.keys.seeds, list(self.run_.states)), ({1}, [(3,)]))
        moved = torch.zeros(1)
        with mock.patch.object(attention_seeds, "to_device", return_value=moved):
            self.assertEqual(self.results((torch.tensor(8), 3)), [LAUNCH])
        self.assertIs(self.graphs[-1].inputs[-1][1], moved)


class TestErrors(RunnerTestCase):
    """Of a launch."""

    def test_error(self):
        self.results((), ())
        self.graphs[-1].result = RuntimeError("an illegal access")
        with self.assertRaisesRegex(RuntimeError, "an illegal access"):
            self.results(())

    def test_node_that_the_driver_can_not_set(self):
        graph = self.graphs[-1]
        graph.result, graph.launcher.shared = NOT_SET, "an executable"
        sizes = self.run_.states.sizes
        kept = SimpleNamespace(launchers=[graph.launcher])
        sizes.executables.append(kept)
        self.assertEqual(self.results((), ()), [RUN, RUN])
        state = self.run_.states[()]
        self.assertEqual((state.alone, state.relaunch), (True, None))
        self.assertEqual(self.run_.outside, {"warm-up": 1, "busy": 1})
        self.assertEqual(self.said(), [])

    def test_kernel_that_the_driver_can_not_launch(self):
        graph = self.graphs[-1]
        graph.result = RuntimeError("cuLaunchKernelEx: invalid argument")
        graph.launcher = mock.Mock(spec=ByNode, nodes=5, shared=None, patcher=None)
        self.assertEqual(self.results((), ()), [RUN, RUN])
        state = self.run_.states[()]
        self.assertEqual((state.alone, state.relaunch), (True, None))
        self.assertEqual(self.run_.outside, {"warm-up": 1, "busy": 1})

    def test_copies_that_can_not_be_patched(self):
        self.copies.return_value = ["a node"]
        self.graphs[-1].result = RuntimeError("invalid argument")
        self.assertEqual(self.results((), (), ()), [RUN, RUN, RUN])
        self.assertEqual(self.said(), ["host-memory"])
        self.assertEqual(len(self.graphs[-1].inputs), 1)

    def test_no_memory_at_the_first_launch(self):
        self.copies.return_value = ["a node"]
        graph = self.graphs[-1]
        graph.result = torch.OutOfMemoryError("full")
        self.results(())
        with self.assertRaises(torch.OutOfMemoryError):
            self.results(())
        graph.result = "launched"
        self.assertEqual(self.results(()), [LAUNCH])
        self.assertEqual((self.make.call_count, self.said()), (2, []))

    def test_launch_from_a_finalizer(self):
        with mock.patch.object(module, "launching", return_value=True):
            self.assertEqual(self.results((), ()), [RUN, RUN])
        self.assertEqual(self.run_.outside, {"callers-capture": 2})


if __name__ == "__main__":
    run_tests()
