"""Tests of library calls that are captured again alone, where a further size launches functions never seen."""

import threading
import types
from unittest import mock

import torch

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay._inductor.relaunch.capture import capture, make_graph
from torch_overlay._inductor.relaunch.capture.library_calls import calls_of, Differs
from torch_overlay._inductor.relaunch.sizes import sizes


# From size 9 on, the library's second call and the last one launch other functions than before.
SIZED = region(
    "x, w, n",
    "a = empty_strided_cuda((n, 4), (4, 1), torch.float32)",
    "extern_kernels.mm(x, w, out=a)",
    "b = empty_strided_cuda((n, 4), (4, 1), torch.float32)",
    "extern_kernels.double(a, n, out=b)",
    "del a",
    "c = empty_strided_cuda((n, 4), (4, 1), torch.float32)",
    "extern_kernels.square(b, n, out=c)",
    "return (c, b[n // 2:], n)",
)


def double(a, n, *, out):
    return torch.add(a, a, out=out) if n < 9 else torch.mul(a, 2, out=out)


def square(b, n, *, out):
    return torch.mul(b, b, out=out) if n < 9 else torch.square(b, out=out)


class LibraryCallsTestCase(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(sizes, "OWN", 1))
        self.w = torch.randn(4, 4)
        self.alone: list[int] = []  # how many calls were made again in each capture of calls alone
        self.whole = 0  # captures of the whole region

        def again(calls, *args):
            self.alone.append(len(calls))
            return capture_again(calls, *args)

        def run(this, code):
            self.whole += 1
            return run_capture(this, code)

        capture_again, run_capture = make_graph.capture_again, capture.Capture.run
        self.enterContext(mock.patch.object(make_graph, "capture_again", again))
        self.enterContext(mock.patch.object(capture.Capture, "run", run))

    def sized(self, source=SIZED, **functions):
        library = types.SimpleNamespace(mm=torch.mm, double=double, square=square)
        library.__dict__.update(functions)
        return self.runner(source, extern_kernels=library)

    def call(self, run, n, x=None):
        x = torch.randn(n, 4) if x is None else x
        b = 2 * (x @ self.w)
        for have, want in zip(run([x, self.w, n]), (b * b, b[n // 2 :], n), strict=True):
            self.assertEqual(have, want, f"size {n}")

    def grow(self, run):
        """Call sizes of the first functions, then those of the others, and all of them in turn. Return how often the
        whole region was captured for the first of the others."""
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)
        before = self.whole
        for n in (9, 9):
            self.call(run, n)
        captures = self.whole - before
        for n in (10, 10, 4, 9, 3, 10, 5, 9):
            self.call(run, n)
        return captures


class TestLibraryCalls(LibraryCallsTestCase):
    def test_only_calls_that_launch_unknown_functions_are_captured_again(self):
        self.assertEqual(self.grow(self.sized()), 1)
        self.assertEqual(self.alone, [2], "9 launches two functions never seen, 10 none")
        self.assertEqual(self.whole, 2 + 4, "the first size is captured twice, and each further one once")

    def test_later_nodes_of_a_known_library_stay_known(self):
        run = self.sized(square=lambda b, n, out: torch.mul(b, b, out=out))
        self.assertEqual(self.grow(run), 1)
        self.assertEqual(self.alone, [1])

    def test_one_call_of_each_function_is_captured_again(self):
        source = SIZED.replace(
            "    return", "    for _ in range(4):\n        extern_kernels.square(b, n, out=c)\n    return"
        )
        self.assertEqual(self.grow(self.sized(source)), 1)
        self.assertEqual(self.alone, [2])

    def test_driver_that_lists_nodes_in_another_order(self):
        self.device.lists_backwards = True
        self.assertEqual(self.grow(self.sized()), 1)
        self.assertEqual(self.alone, [2])

    def workspace(self, used):
        """A library that allocates a workspace when it is first used in a capture, and keeps it until the end."""
        kept = {}

        def mm(x, w, *, out):
            recording = getattr(self.device.thread, "recording", None)
            if recording is None:
                return torch.mm(x, w, out=out)
            if recording not in kept:
                kept[recording] = recording.allocate((64,), (1,), torch.float32)
            if not used:
                return torch.mm(x, w, out=out)
            part = kept[recording][: out.numel()].view_as(out)
            torch.mm(x, w, out=part)
            return torch.add(part, 0, out=out)

        def square_by(b, n, *, out):
            recording = getattr(self.device.thread, "recording", None)
            if recording is None or not used or n < 9:
                return square(b, n, out=out)
            part = kept[recording][: out.numel()].view_as(out)
            torch.square(b, out=part)
            return torch.mul(part, 1, out=out)

        return {"mm": mm, "square": square_by}

    def test_workspace_of_an_earlier_call(self):
        self.assertEqual(self.grow(self.sized(**self.workspace(used=True))), 1)
        self.assertEqual(self.alone, [3], "the call that allocates it is made again, too")

    def test_workspace_that_is_not_used(self):
        self.assertEqual(self.grow(self.sized(**self.workspace(used=False))), 1)

    def test_library_that_allocates_otherwise_alone(self):
        def allocates(a, n, *, out):
            if (recording := getattr(self.device.thread, "recording", None)) is not None:
                recording.allocate((1 + len(recording.operations),), (1,), torch.float32)
            return double(a, n, out=out)

        self.assertEqual(self.grow(self.sized(double=allocates)), 2)

    def test_library_that_fails_alone(self):
        calls = []

        def needs_mm(a, n, *, out):
            if calls[-1] is not getattr(self.device.thread, "recording", None):
                raise RuntimeError("the library is not ready")
            return double(a, n, out=out)

        def mm(x, w, *, out):
            calls.append(getattr(self.device.thread, "recording", None))
            return torch.mm(x, w, out=out)

        self.assertEqual(self.grow(self.sized(mm=mm, double=needs_mm)), 2)
        self.assertEqual(self.alone[:1], [2])

    def test_kept_pointer_of_an_earlier_call(self):
        """Alone, the library still uses the tensor of the capture before, which is at the same address in both."""
        kept = []

        def mm(x, w, *, out):
            kept[:] = [x]
            return torch.mm(x, w, out=out)

        def of_kept(b, n, *, out):
            if n < 9:
                return torch.mul(b, b, out=out)
            torch.mul(kept[0], 0, out=out)
            return torch.addcmul(out, b, b, out=out)

        self.assertEqual(self.grow(self.sized(mm=mm, square=of_kept)), 2)
        self.assertEqual(self.alone[:1], [2])

    def test_library_that_chooses_otherwise_alone(self):
        calls = []

        def moody(a, n, *, out):
            if getattr(self.device.thread, "recording", None) is not None and n >= 9:
                calls.append(n)
            return torch.mul(a, 2, out=out) if len(calls) % 3 != 2 else torch.add(a, a, out=out)

        self.grow(self.sized(double=moody))
        self.assertGreater(len(self.alone), 0)

    def test_functions_that_are_launched_by_other_code(self):
        source = SIZED.replace("extern_kernels.double(a, n, out=b)", "double(a, n, out=b)")
        run = self.runner(source, extern_kernels=types.SimpleNamespace(mm=torch.mm, square=square), double=double)
        self.assertEqual(self.grow(run), 2)
        self.assertEqual(self.alone, [])

    def test_function_that_returns_its_result(self):
        source = SIZED.replace("    extern_kernels.double(a, n, out=b)", "    b = extern_kernels.double_new(a, n)")
        run = self.sized(source, double_new=lambda a, n: a + a if n < 9 else a * 2)
        self.assertEqual(self.grow(run), 2)
        self.assertEqual(self.alone, [])

    def test_argument_in_a_list_and_a_part_of_a_tensor(self):
        source = SIZED.replace(
            "    extern_kernels.square(b, n, out=c)", "    extern_kernels.halves([b[:n // 2], b[n // 2:]], n, out=c)"
        )

        def halves(parts, n, *, out):
            for part, into in zip(parts, out.split([len(part) for part in parts])):
                square(part, n, out=into)
            return out

        self.assertEqual(self.grow(self.sized(source, halves=halves)), 1)
        self.assertEqual(self.alone, [2])

    def test_misaligned_input(self):
        run = self.sized()
        for n in (3, 3, 4, 4):
            self.call(run, n)
        for n in (9, 9, 10, 10, 9):
            self.call(run, n, torch.randn(4 * n + 1)[1:].view(n, 4))
        self.assertEqual(self.alone, [2])

    def test_other_threads_call_the_library_meanwhile(self):
        threads, results = [], []

        def mm(x, w, *, out):
            if getattr(self.device.thread, "recording", None) is not None:
                library = run.region.model.__globals__["extern_kernels"]

                def work():
                    results.append(library.double(torch.ones(2, 2), 9, out=torch.empty(2, 2)))

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                threads.append(thread)
            return torch.mm(x, w, out=out)

        run = self.sized(mm=mm)
        self.assertEqual(self.grow(run), 1)
        self.assertEqual(len(results), len(threads))
        self.assertTrue(all(torch.equal(made, torch.full((2, 2), 2.0)) for made in results))

    def test_the_library_is_put_back(self):
        run = self.sized()
        self.grow(run)
        self.assertIs(type(run.region.model.__globals__["extern_kernels"]), types.SimpleNamespace)

    def test_nodes_of_no_call(self):
        with self.assertRaisesRegex(Differs, "1 nodes are not launched by calls of a library"):
            calls_of([], {0})
