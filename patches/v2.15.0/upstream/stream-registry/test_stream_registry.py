# Owner(s): ["module: dynamo"]

import gc
import importlib
import weakref
from types import SimpleNamespace

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo._streams import objects, registry
from torch._dynamo.source import CurrentStreamSource, LocalSource
from torch._guards import tracing, TracingContext
from torch.testing._internal.common_utils import run_tests, TestCase


CUDA = torch.device("cuda", 0)


def stream(stream_id, device=0):
    return torch.Stream(stream_id=stream_id, device_index=device, device_type=1)


class Thing:
    """What a frame makes, with what it is made of."""

    def __init__(self, *args, **kwargs):
        self.made_of = args, kwargs


class Code:
    """Stands for PyCodegen, and runs at once what is emitted."""

    def __init__(self, package=None):
        self.stack, self.globals = [], {}
        self.tx = SimpleNamespace(output=self)
        self.package = package

    def install_global_by_id(self, prefix, value):
        name = f"{prefix}_{len(self.globals)}"
        self.globals[name] = value
        return name

    def new_var(self, name):
        return f"{name}_{len(registry.current().locals)}"

    def add_push_null(self, function):
        function()

    def load_import_from(self, module, name):
        self.stack.append(getattr(importlib.import_module(module), name))

    def create_load_global(self, name, add):
        return self.globals[name]

    def create_load_const(self, value):
        if not isinstance(value, (int, str)):
            raise AssertionError(f"{value!r} is no constant of bytecode")
        return value

    def append_output(self, value):
        self.stack.append(value)

    def call_function(self, count, push_null):
        self.call(count, ())

    def create_call_function_kw(self, count, names, push_null):
        return count, names

    def extend_output(self, call):
        self.call(*call)

    def call(self, count, names):
        first = len(self.stack) - count
        function, args = self.stack[first - 1], self.stack[first:]
        positional, named = args[: count - len(names)], args[count - len(names) :]
        self.stack[first - 1 :] = [function(*positional, **dict(zip(names, named)))]


class TestStreamRegistry(TestCase):
    def setUp(self):
        super().setUp()
        self.clear()
        self.addCleanup(self.clear)
        self.kept = []

    def clear(self):
        numbering.reset_user_object_tracking()
        registry.reset()

    def keep(self, value):
        self.kept.append(value)  # the numbering has weak references
        return value

    def add(self, value, name, source=None):
        register, source = numbering.register_user_object, source or LocalSource(name)
        return registry.add_callers_object(register, self.keep(value), source)

    def add_current(self):
        """Number the caller's stream, as Dynamo does first."""
        self.add(stream(7), "current", CurrentStreamSource(CUDA))

    def emit(self, index, package=None):
        code = Code(package)
        numbering.index_to_bytecode_constructor[index](code)
        return code

    def test_description(self):
        self.add_current()
        side = self.add(stream(3, device=1), "side")
        event = self.add(torch.Event("cuda"), "event")
        current = registry.add_current(
            self.keep(stream(0, device=2)), CurrentStreamSource(torch.device("cuda", 2))
        )
        own = registry.add_owned(stream(4), Thing, (), {}, priority=-1)
        own_event = registry.add_owned(torch.Event("cuda"), Thing, (), {}, timing=True)
        other = registry.add_owned(Thing(), Thing, (), {})
        self.assertEqual(
            [side, event, current, own, own_event, other], [1, 2, 3, 4, 5, 6]
        )
        rows = [
            (i.index, i.origin, i.escapes, i.kind, i.device and i.device.index)
            for i in registry.describe()
        ]
        wanted = [
            (0, "current", False, "stream", 0),
            (1, "caller", True, "stream", 1),
            (2, "caller", True, "event", None),
            (3, "current", False, "stream", 2),
            (4, "frame", False, "stream", 0),
            (5, "frame", False, "event", None),
            (6, "frame", False, "other", None),
        ]
        self.assertEqual(rows, wanted)
        made = [(i.priority, i.timing) for i in registry.describe()[4:]]
        self.assertEqual(made, [(-1, None), (None, True), (None, None)])

    def test_escape_of_an_object_of_the_frame(self):
        first, second = (
            registry.add_owned(self.keep(stream(i)), Thing, (), {}) for i in range(2)
        )
        self.assertEqual([i.escapes for i in registry.describe()], [False, False])
        name = registry.local_of(Code(), second)
        self.assertEqual([i.escapes for i in registry.describe()], [False, True])
        self.assertEqual(registry.local_of(Code(), second), name)
        self.assertNotEqual(registry.local_of(Code(), first), name)

    def test_event_with_two_names_has_one_number(self):
        event, other = torch.Event("cuda"), torch.Event("cuda")
        with tracing(TracingContext(None)) as context:
            found = [self.add(event, "e"), self.add(other, "f"), self.add(event, "g")]
            guards = list(context.guards_context.dynamo_guards)
        self.assertEqual(found, [0, 1, 0])
        self.assertEqual([guard.name for guard in guards], [LocalSource("g").name])
        self.assertEqual(len(numbering.index_to_bytecode_constructor), 2)

    def test_stream_that_is_the_callers(self):
        self.add_current()
        with tracing(TracingContext(None)) as context:
            self.assertEqual(self.add(stream(7), "same"), 0)
            guards = list(context.guards_context.dynamo_guards)
            self.assertEqual(self.add(stream(8), "other"), 1)
            self.assertEqual(self.add(stream(7, device=1), "device"), 2)
            self.assertEqual(set(context.guards_context.dynamo_guards), set(guards))
        (guard,) = guards
        self.assertEqual(guard.name, LocalSource("same").name)
        self.assertEqual(guard.create_fn_name(), "CURRENT_STREAM_MATCH")

    def test_programs_with_streams(self):
        for has, value in (
            (True, stream(1)),
            (True, torch.Event("cuda")),
            (False, Thing()),
        ):
            self.clear()
            self.add(value, "value")
            self.assertEqual(registry.current().has_streams, has)
        self.clear()
        self.add_current()
        self.assertFalse(registry.current().has_streams)
        registry.note_streams()
        self.clear()
        self.assertFalse(registry.current().has_streams)
        self.assertTrue(registry.program_has_streams())

    def test_object_that_nobody_sees_is_kept_by_the_code(self):
        index = registry.add_owned(stream(1), Thing, (CUDA,), {"priority": -1})
        code = self.emit(index)
        (owned,) = code.stack
        self.assertIs(type(owned), objects.Owned)
        self.assertIn(owned, code.globals.values())
        made = owned.resolve()
        self.assertEqual(made.made_of, ((CUDA,), {"priority": -1}))
        self.assertIs(owned.resolve(), made)

    def test_object_that_others_see_is_made_at_each_call(self):
        index = registry.add_owned(stream(1), Thing, (CUDA, 3), {"priority": -1})
        plain = registry.add_owned(stream(2), Thing, (3,), {})
        for number in (index, plain):
            registry.local_of(Code(), number)
        (first,), (second,) = self.emit(index).stack, self.emit(index).stack
        self.assertEqual(first.made_of, ((CUDA, 3), {"priority": -1}))
        self.assertIsNot(first, second)
        (made,) = self.emit(plain).stack
        self.assertEqual(made.made_of, ((3,), {}))

    def test_packaged_code_makes_its_objects_at_each_call(self):
        index = registry.add_owned(stream(1), Thing, (), {})
        code = self.emit(index, package=object())
        self.assertEqual([type(value) for value in code.stack], [Thing])
        self.assertEqual(code.globals, {})

    def test_frame_begins_with_nothing(self):
        registry.add_owned(self.keep(stream(1)), Thing, (), {})
        objects.enter("a")
        frame = registry.current()
        registry.reset()
        self.assertIsNone(objects.current())
        self.assertIsNot(registry.current(), frame)
        self.assertEqual([i.origin for i in registry.describe()], ["current"])

    def test_inner_frame_leaves_no_trace(self):
        def lists():
            return [
                list(numbering.index_to_bytecode_constructor),
                list(numbering.index_to_external_object_weakref),
                list(numbering.keep_alive),
            ]

        self.add_current()
        registry.add_owned(stream(1), Thing, (), {})
        before, frame, described = lists(), registry.current(), registry.describe()
        objects.enter("a")

        def compile_inner():
            with registry.inner_frame():
                self.assertIsNone(objects.current())
                self.clear()
                value = Thing()
                registry.add_owned(value, Thing, (), {})
                self.assertEqual(len(registry.describe()), 1)
                alive.append(weakref.ref(value))
                raise ValueError("no graph")

        alive = []
        with self.assertRaisesRegex(ValueError, "no graph"):
            compile_inner()
        self.assertEqual(lists(), before)
        self.assertIs(registry.current(), frame)
        self.assertEqual(registry.describe(), described)
        self.assertEqual(objects.get(0), "a")
        gc.collect()
        self.assertIsNone(alive[0]())

    def test_backward_is_compiled_after_other_frames(self):
        registry.remember()  # outside of a trace it is nothing
        context = TracingContext(None)
        with tracing(context):
            index = registry.add_owned(stream(1), Thing, (), {})
            registry.remember()
        self.clear()
        self.add(torch.Event("cuda"), "event")
        self.assertEqual([i.kind for i in registry.describe()], ["event"])
        with tracing(TracingContext(None)):
            self.assertEqual([i.kind for i in registry.describe()], ["event"])
        with tracing(context):
            (info,) = registry.describe()
        self.assertEqual((info.index, info.kind), (index, "stream"))
        count = len(registry._remembered)
        del context
        gc.collect()
        self.assertEqual(len(registry._remembered), count - 1)


if __name__ == "__main__":
    run_tests()
