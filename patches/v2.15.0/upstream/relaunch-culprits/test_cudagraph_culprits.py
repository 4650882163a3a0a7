# Owner(s): ["module: inductor"]

import threading
import time
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.cudagraph_relaunch import blame as module, refusals
from torch._inductor.cudagraph_relaunch.allocations import Plan
from torch._inductor.cudagraph_relaunch.blame import (
    find_culprit,
    find_launcher,
    make_or_blame,
    NoGraph,
)
from torch._inductor.cudagraph_relaunch.culprit import (
    Culprit,
    did,
    ERRORS,
    Launchers,
    line_of_error,
    name_of,
    other_threads_run,
    Suspects,
    user_line,
)
from torch._inductor.cudagraph_relaunch.nodes import Refusal
from torch._inductor.cudagraph_relaunch.sizes import Sizes
from torch._inductor.cudagraph_relaunch.traced import Escaped
from torch.testing._internal.common_utils import run_tests, TestCase


PATH = "/generated.py"
HANDLES = [10, 20, 30]  # of the nodes of a capture


class CulpritTestCase(TestCase):
    """Generated code that calls an operator of the user's, which acts on a capture."""

    def setUp(self):
        super().setUp()
        self.act = self.finish = lambda: None
        self.broken, self.nodes = False, []
        library = self.enterContext(torch.library._scoped_library("culprits", "DEF"))
        for name in ("first", "second"):
            library.define(f"{name}(Tensor x) -> Tensor")
        library.impl("first", self.first, "CompositeExplicitAutograd")
        library.impl("second", lambda x: x * 3, "CompositeExplicitAutograd")
        frames = self.enterContext(
            mock.patch.object(PyCodeCache, "stack_frames_for_code")
        )
        frames.side_effect = lambda path, line: (
            [{"filename": "model.py", "line": 100 + line}] if path == PATH else None
        )

    def first(self, x):
        self.act()
        return x * 2

    def break_it(self):
        self.broken = True

    def raising(self, error):
        def act():
            raise error

        return act

    def region(self, *lines):
        """A function of generated code, with its globals. Its first line is the second."""
        scope = {"torch": torch, "launch": self.nodes.append}
        text = "def call(x):\n    " + "\n    ".join(lines)
        exec(compile(text, PATH, "exec"), scope)
        return scope["call"], scope

    def find(self, *lines):
        call, scope = self.region(*lines)
        suspects = Suspects(scope, lambda: self.broken)
        try:
            with suspects:
                call(torch.ones(2))
        except Exception:
            pass
        return suspects.found


FIRST = "x = torch.ops.culprits.first(x)"
SECOND = "x = torch.ops.culprits.second(x)"
NAMED = "culprits::first.default", "model.py:103"  # FIRST as the second line


class TestSuspects(CulpritTestCase):
    def test_operator_that_raises(self):
        self.act = self.raising(RuntimeError("would make the stream\nwait"))
        found = self.find(SECOND, FIRST, SECOND)
        self.assertEqual((found.operator, found.line), NAMED)
        self.assertEqual(found.did, "raises RuntimeError: would make the stream")
        self.assertFalse(found.is_innocent)

    def test_operator_that_breaks_the_capture_without_an_error(self):
        self.act = self.break_it
        found = self.find(SECOND, FIRST, SECOND)
        self.assertEqual(found, Culprit(*NAMED, "breaks the capture"))

    def test_no_operator(self):
        self.assertIsNone(self.find(FIRST, SECOND))
        self.assertIsNone(self.find(FIRST, "raise ValueError"))

    def test_operator_of_other_code(self):
        self.act = self.break_it
        suspects = Suspects({}, lambda: self.broken)
        with suspects:
            torch.ops.culprits.first(torch.ones(2))
        self.assertTrue(self.broken)
        self.assertIsNone(suspects.found)

    def test_no_memory(self):
        self.act = self.raising(torch.OutOfMemoryError("full"))
        self.assertTrue(self.find(FIRST).is_innocent)

    def test_operator_that_models_are_made_of(self):
        found = self.find("torch.mm(x, x)")
        self.assertEqual(found.operator, "aten::mm.default")
        self.assertTrue(found.is_innocent)


class TestLaunchers(CulpritTestCase):
    LINES = "launch(10)", FIRST, "launch(30)"

    def setUp(self):
        super().setUp()
        self.act = lambda: self.nodes.append(20)

    def test_operator_that_made_a_node(self):
        call, scope = self.region(*self.LINES)
        with Launchers(scope, lambda: list(self.nodes)) as launchers:
            call(torch.ones(2))
        self.assertEqual(self.nodes, HANDLES)
        made = launchers.culprit(20, "did it")
        self.assertEqual(made, Culprit(*NAMED, "did it"))
        for kernel in (10, 30):
            self.assertIsNone(launchers.culprit(kernel, "did it"))


class TestWords(CulpritTestCase):
    def test_errors_of_cuda(self):
        for number, (text, what) in ERRORS.items():
            by_text, by_code = RuntimeError(f"CUDA error: {text}."), RuntimeError("?")
            by_code.error_code = number
            for error in (by_text, by_code):
                self.assertEqual(did(error), f"{what} (CUDA error {number})")

    def test_error_without_a_text(self):
        self.assertEqual(did(RuntimeError()), "raises RuntimeError: ")

    def test_names(self):
        self.assertEqual(name_of(torch.ops.aten.add.out), "aten::add.out")
        self.assertEqual(name_of(torch.ops.higher_order.cond), "cond")
        self.assertEqual(name_of("x"), "x")

    def test_lines(self):
        self.assertEqual(user_line(PATH, 5), "model.py:105")
        self.assertEqual(user_line("/elsewhere.py", 5), "")
        inside = {"filename": torch.nn.modules.linear.__file__, "line": 1}
        ours = {"filename": "model.py", "line": 7}
        for frames, line in (
            ([inside, ours], "model.py:7"),
            ([inside], f"{inside['filename']}:1"),
        ):
            with mock.patch.object(
                PyCodeCache, "stack_frames_for_code", return_value=frames
            ):
                self.assertEqual(user_line(PATH, 5), line)

    def test_line_of_an_error(self):
        call, scope = self.region("x = 1", "return [][x]")
        try:
            call(None)
        except IndexError as error:
            self.assertEqual(line_of_error(error, scope), "model.py:103")
            self.assertEqual(line_of_error(error, {}), "")
        else:
            self.fail("no error")


class TestThreads(TestCase):
    def test_only_threads_that_work(self):
        go, working = threading.Event(), []

        def work():  # nothing of threading's
            working.append(True)
            while working:
                time.sleep(0)

        threads = [threading.Thread(target=go.wait), threading.Thread(target=work)]
        self.enterContext(
            mock.patch.object(threading, "enumerate", lambda: threads)
        )  # without those of tests before
        try:
            threads[0].start()
            self.assertFalse(other_threads_run())
            threads[1].start()
            while not working:
                time.sleep(0)
            self.assertTrue(other_threads_run())
        finally:
            go.set()
            working.clear()
            for thread in threads:
                if thread.ident:
                    thread.join()


class Recording:
    blocking = closed = False

    def close(self):
        self.closed = True


class TestBlame(CulpritTestCase):
    def work(self, *lines):
        call, scope = self.region(*lines)

        def record(gap, inputs=0):
            self.recording = Recording()
            self.recording.nodes = lambda: list(self.nodes)
            return self.recording

        def capture(recording):
            self.assertIs(recording, self.recording)
            call(torch.ones(2))
            self.finish()
            return "captured"

        device = SimpleNamespace(
            record=record,
            is_capture_broken=lambda: self.broken,
            handle_of=lambda captured, number: HANDLES[number],
        )
        return SimpleNamespace(
            namespace=scope, device=device, capture=capture, inputs=()
        )

    def tearDown(self):
        self.assertTrue(self.recording.closed)
        super().tearDown()

    def test_capture_that_fails(self):
        self.act = self.raising(RuntimeError("no"))
        found = find_culprit(self.work(SECOND, FIRST))
        self.assertEqual((found.operator, found.line), NAMED)
        self.assertFalse(self.recording.blocking)

    def test_capture_that_fails_at_its_end(self):
        self.act, self.finish = self.break_it, self.raising(RuntimeError("broken"))
        found = find_culprit(self.work(SECOND, FIRST))
        self.assertEqual((found.operator, found.did), (NAMED[0], "breaks the capture"))

    def test_launch_on_the_default_stream(self):
        def launch():
            if self.recording.blocking:
                raise RuntimeError(
                    "CUDA error: operation would make the legacy stream depend on a"
                )

        self.act = launch
        self.assertIsNone(find_culprit(self.work(FIRST)))
        found = find_culprit(self.work(FIRST), blocking=True)
        self.assertEqual(found.did, "launches on the default stream (CUDA error 906)")

    def test_kernel_that_the_proof_refuses(self):
        self.act = lambda: self.nodes.append(20)
        refusal = Refusal("foreign", "it points elsewhere", node="1 (kernel)")
        found = find_launcher(self.work("launch(10)", FIRST, "launch(30)"), refusal)
        what = "launches a kernel that can't be relaunched [foreign]"
        self.assertEqual(found, Culprit(*NAMED, what))

    def test_kernel_of_no_operator(self):
        refusal = Refusal("foreign", "it points elsewhere", node="2 (kernel)")
        work = self.work("launch(10)", FIRST, "launch(30)")
        self.assertIsNone(find_launcher(work, refusal))

    def test_refusal_without_a_node(self):
        work = self.work(FIRST)
        work.device.record(1).close()
        with mock.patch.object(work.device, "record") as record:
            self.assertIsNone(find_launcher(work, Refusal("edges", "no node")))
            record.assert_not_called()


BLAMED = Culprit("mylib::op", "a:1", "did it")


class TestNoGraph(TestCase):
    """What making the graph of a region, and looking for culprits, is replaced."""

    def setUp(self):
        super().setUp()
        for name, result in (
            ("make_graph", (mock.Mock(), [mock.Mock()])),
            ("find_culprit", None),
            ("find_launcher", None),
            ("other_threads_run", False),
            ("line_of_error", "model.py:5"),
        ):
            replaced = mock.patch.object(module, name, return_value=result)
            setattr(self, name, self.enterContext(replaced))
        launchable = self.enterContext(mock.patch.object(module.staged, "launchable"))
        self.made = launchable.return_value
        self.work = mock.Mock(plan=Plan(), is_shared=False, sizes=Sizes(8))

    def fails(self, error=None):
        if error is not None:
            self.make_graph.side_effect = error
        with self.assertRaises(NoGraph) as caught:
            make_or_blame(self.work)
        found = caught.exception
        return found.reason, found.operator, found.line, found.is_final, found.culprit

    def test_graph(self):
        for self.work.is_shared in (False, True):
            self.assertIs(make_or_blame(self.work), self.made)
            self.assertEqual(self.work.sizes.captured, int(self.work.is_shared))

    def test_refusal(self):
        self.find_launcher.return_value = BLAMED
        refusal = Refusal("foreign", "it points elsewhere", node="1 (kernel)")
        self.assertEqual(self.fails(refusal), ("foreign", "", "", True, BLAMED))
        self.find_launcher.assert_called_once_with(self.work, refusal)

    def test_error(self):
        with self.assertLogs(refusals.log, "INFO"):
            found = self.fails(ValueError("no"))
        self.assertEqual(found, ("capture", "", "model.py:5", False, None))

    def test_operator_that_fails(self):
        self.find_culprit.return_value = BLAMED
        found = self.fails(ValueError("no"))
        self.assertEqual(found, ("capture", "mylib::op", "a:1", False, BLAMED))

    def test_operator_that_is_not_to_blame(self):
        """Its name is told, and it is not split off."""
        self.find_culprit.return_value = Culprit("aten::mm", "a:1", "did it", True)
        found = self.fails(torch.OutOfMemoryError("full"))
        self.assertEqual(found, ("out-of-memory", "aten::mm", "a:1", False, None))

    def test_operators_that_may_launch_on_the_default_stream(self):
        self.work.plan = Plan(opaque=True)
        self.assertIs(make_or_blame(self.work), self.made)
        self.find_culprit.assert_called_once_with(self.work, blocking=True)
        self.find_culprit.return_value = BLAMED
        self.make_graph.reset_mock()
        self.assertEqual(self.fails(), ("operator", "", "", True, BLAMED))
        self.make_graph.assert_not_called()  # which would end the process
        self.other_threads_run.return_value = True
        self.assertIs(make_or_blame(self.work), self.made)

    def test_number_that_has_to_be_in_the_key(self):
        self.make_graph.side_effect = Escaped(frozenset([1]), "a decision")
        with self.assertRaises(Escaped):
            make_or_blame(self.work)
        self.find_culprit.assert_not_called()


if __name__ == "__main__":
    run_tests()
