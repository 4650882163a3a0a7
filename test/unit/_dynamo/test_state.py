"""`_dynamo.state`: the numbers of streams, and the code of a frame's prologue."""

from unittest import mock

import torch
import torch._dynamo.test_case
import torch.fx.traceback as fx_traceback
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.streams import StreamVariable
from torch._guards import tracing, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream
from torch_overlay._dynamo import registry, state


class Translator:
    """Stands for the translator of a frame, and for its output."""

    def __init__(self):
        self.output, self.graph = self, torch.fx.Graph()
        self.hooks, self.names = [], []

    def create_proxy(self, kind, target, args, kwargs):
        return torch.fx.Proxy(self.graph.create_node(kind, target, args, kwargs))

    def add_cleanup_hook(self, hook):
        self.hooks.append(hook)

    def new_var(self, name):
        self.names.append(f"{name}_{len(self.names)}")
        return self.names[-1]

    def looked_up(self):
        return [node.args[0] for node in self.graph.nodes]


class Code:
    """Stands for PyCodegen, and notes what is emitted."""

    def __init__(self, tx):
        self.tx, self.emitted = tx, []

    def add_push_null(self, function):
        function()

    def load_import_from(self, module, name):
        self.emitted.append(f"{module.rpartition('.')[2]}.{name}")

    def create_load(self, name):
        return name

    def append_output(self, value):
        self.emitted.append(value)

    def call_function(self, count, push_null):
        self.emitted.append(f"call {count}")


class TestStreamState(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.callers = {device: stream(10 + device, device) for device in range(3)}
        self.device = 1

        def current(device=None):
            return self.callers[self.device if device is None else device]

        self.enterContext(accelerator(current, lambda: self.device))
        self.enterContext(tracing(TracingContext(FakeTensorMode())))
        self.addCleanup(numbering.reset_user_object_tracking)
        self.tx, self.state = Translator(), state.StreamState()

    def current(self, *args, **kwargs):
        return self.state.current(self.tx, *args, **kwargs)

    def stream(self, stream_id, device=1):
        """Return a variable of a stream that the frame has."""
        value = stream(stream_id, device)
        index = registry.add_owned(value, torch.Stream, (), {})
        return StreamVariable(None, value, index)

    def test_callers_stream_of_the_frames_device_is_number_0(self):
        current = self.current()
        self.assertIs(current.value, self.callers[1])
        self.assertIs(current.python_type(), torch.cuda.Stream)
        plain = self.current(base=True)
        self.assertIs(plain.python_type(), torch.Stream)
        self.assertIs(self.current(), current)
        self.assertEqual(self.tx.looked_up(), [0, 0])
        self.assertIs(numbering.get_external_object_by_index(0), self.callers[1])
        self.device = 0  # a device context does so while tracing
        self.assertIs(self.current(1), current)

    def test_callers_stream_of_another_device_has_a_number(self):
        own = self.stream(1)
        other, plain = self.current(2), self.current(2, base=True)
        self.device = 2
        self.assertIs(self.current(), other)
        self.assertEqual(
            [own.user_object_index, other.user_object_index, plain.user_object_index],
            [1, 2, 2],
        )
        self.assertIs(other.value, self.callers[2])
        origins = [info.origin for info in registry.describe()]
        self.assertEqual(origins, ["current", "frame", "current"])

    def test_context_changes_the_stream_of_its_device(self):
        first, second, other = self.stream(1), self.stream(2), self.stream(3, 2)
        self.state.push(first, None)
        self.assertIs(self.current(), first)
        self.assertIs(self.current(2).value, self.callers[2])
        self.state.push(other, None)
        self.assertEqual([self.current(1), self.current(2)], [first, other])
        self.state.push(second, None)
        self.assertEqual([self.current(1), self.current(2)], [second, other])
        for _ in range(2):
            self.state.pop()
        self.assertIs(self.current(1), first)
        self.state.pop()
        for device in (1, 2):
            self.assertIs(self.current(device).value, self.callers[device])

    def test_stream_that_is_set_in_a_context_ends_with_it(self):
        first, second = self.stream(1), self.stream(2)
        self.state.push(first, first)
        self.state.set_stream(self.tx, second)
        self.assertIs(self.current(), second)
        self.assertIs(first.stream_now, second)
        self.state.pop()
        self.assertIs(self.current().value, self.callers[1])
        self.assertEqual(registry.current().set_streams, {})
        self.assertEqual(self.tx.hooks, [])

    def test_stream_that_is_set_stays_beyond_the_frame(self):
        first, second, other = self.stream(1), self.stream(2), self.stream(3, 2)
        set_streams = registry.current().set_streams
        self.state.set_stream(self.tx, first)
        self.device = 2
        self.state.set_stream(self.tx, other)
        self.device = 1
        self.state.set_stream(self.tx, second)
        self.assertEqual([self.current(1), self.current(2)], [second, other])
        devices = [torch.device("cuda", index) for index in (2, 1)]
        wanted = dict(zip(devices, (other.user_object_index, second.user_object_index)))
        self.assertEqual(list(set_streams.items()), list(wanted.items()))
        # That of the caller is current again when the graph has returned.
        self.state.set_stream(self.tx, self.state.callers_stream(self.tx, 1))
        self.assertEqual(list(set_streams), devices[:1])
        for hook in self.tx.hooks:
            hook()

    def test_nodes_are_annotated_until_the_frame_ends(self):
        first, second = self.stream(1), self.stream(2)
        for before in (None, {"other": 1}):
            self.tx, self.state = Translator(), state.StreamState()
            with mock.patch.dict(fx_traceback.current_meta, clear=True):
                if before is not None:
                    fx_traceback.current_meta["custom"] = before
                for one in (first, second):
                    self.state.set_stream(self.tx, one)
                    self.assertTrue(fx_traceback.has_preserved_node_meta())
                    self.assertEqual(
                        fx_traceback.current_meta["custom"],
                        {**(before or {}), "stream": one.user_object_index},
                    )
                (hook,) = self.tx.hooks
                hook()
                self.assertFalse(fx_traceback.has_preserved_node_meta())
                self.assertEqual(fx_traceback.current_meta.get("custom"), before)

    def test_set_stream_of_another_device(self):
        with self.assertRaisesRegex(Unsupported, "stream of cuda:2 while cuda:1 is cu"):
            self.state.set_stream(self.tx, self.stream(1, device=2))
        self.assertIs(self.current(2).value, self.callers[2])

    def test_callers_stream_that_is_returned(self):
        self.state.callers_stream(self.tx, 1)
        codes = [Code(self.tx) for _ in range(2)]
        for base, code in zip((False, True), codes):
            self.assertIsNone(self.current(base=base).source)
            self.current(base=base).reconstruct(code)
        (name,) = self.tx.names
        self.assertEqual(registry.current().locals, {0: name})
        self.assertEqual(codes[0].emitted, [name])
        self.assertEqual(codes[1].emitted, ["objects.as_base", name, "call 1"])

    def test_frames_that_have_it(self):
        self.tx.symbolic_stream_state = self.state
        self.assertTrue(state.handled(self.tx))
        self.tx.symbolic_stream_state = state.SymbolicStreamState()
        self.assertFalse(state.handled(self.tx))
        for kind, applies in (("cuda", True), ("xpu", False), (None, True)):
            current = mock.patch.object(
                torch.accelerator,
                "current_accelerator",
                return_value=kind and torch.device(kind),
            )
            with current:
                self.assertEqual(state.applies(), applies)

    def test_frame_without_an_accelerator(self):
        with mock.patch.object(torch.accelerator, "is_available", lambda: False):
            empty = state.StreamState()
        self.assertFalse(empty.cuda)
        self.assertEqual(len(empty.levels), 1)
