# Owner(s): ["module: inductor"]

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.testing import CompileCounter
from torch._guards import CompileContext
from torch._inductor.cudagraph_relaunch import split_off
from torch._inductor.cudagraph_relaunch.split_off import (
    compile_again,
    failed,
    FILE,
    MOST,
    remember,
)
from torch.testing._internal.common_utils import run_tests, TestCase


OP, WHY = "mylib::op.default", "launches on the default stream"


class SplitOffTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        split_off.forget()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(self.folder)})
        )
        self.addCleanup(split_off.forget)


class TestNames(SplitOffTestCase):
    def written(self):
        return json.loads((self.folder / FILE).read_text())

    def test_later_process(self):
        self.assertEqual(dict(failed()), {})
        remember(OP, WHY)
        remember(OP, "another reason")
        self.assertEqual(dict(failed()), {OP: WHY})
        split_off.forget()  # as a new process
        self.assertEqual(dict(failed()), {OP: WHY})

    def test_what_other_processes_have_found(self):
        """It is kept for later ones, but the code of this one was compiled without."""
        failed()
        others = {"torch": torch.__version__, "operators": {"other::op": "waits"}}
        (self.folder / FILE).write_text(json.dumps(others))
        remember(OP, WHY)
        self.assertEqual(dict(failed()), {OP: WHY})
        self.assertEqual(self.written()["operators"], {OP: WHY, "other::op": "waits"})
        self.assertEqual([p.name for p in self.folder.iterdir()], [FILE])

    def test_file_that_says_nothing(self):
        for text in (
            "{",
            "[]",
            json.dumps({"torch": "1.0", "operators": {OP: WHY}}),
            json.dumps({"torch": torch.__version__}),
            json.dumps({"torch": torch.__version__, "operators": None}),
        ):
            (self.folder / FILE).write_text(text)
            split_off.forget()
            self.assertEqual(dict(failed()), {})
        remember(OP, WHY)
        self.assertEqual(self.written()["operators"], {OP: WHY})

    def test_cache_that_can_not_be_written(self):
        with (
            mock.patch.object(os, "replace", side_effect=OSError("read-only")),
            self.assertLogs(split_off.log, "INFO") as logs,
        ):
            remember(OP, WHY)
        self.assertIn(f"{OP} fails in a capture: read-only", logs.output[0])
        self.assertEqual(dict(failed()), {OP: WHY})

    def test_without_caches(self):
        remember(OP, WHY)
        with inductor_config.patch(force_disable_caches=True):
            self.assertEqual(dict(failed()), {})
            remember("other::op", WHY)
            self.assertEqual(dict(failed()), {"other::op": WHY})
        self.assertEqual(dict(failed()), {OP: WHY})
        self.assertEqual(self.written()["operators"], {OP: WHY})

    def test_another_cache(self):
        remember(OP, WHY)
        with (
            tempfile.TemporaryDirectory() as other,
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": other}),
        ):
            self.assertEqual(dict(failed()), {})


class TestFrames(SplitOffTestCase):
    def compiled(self, **options):
        """A compiled function, and what counts its compilations. The id of the latest
        one is `self.id`."""
        counter = CompileCounter()

        def backend(gm, inputs):
            self.id = CompileContext.current_compile_id()
            return counter(gm, inputs)

        return torch.compile(lambda x, n=1: x + n, backend=backend, **options), counter

    def test_next_call_compiles(self):
        fn, counter = self.compiled()
        fn(torch.ones(2))
        for count in range(1, 4):
            fn(torch.ones(2))
            self.assertEqual(counter.frame_count, count)
            self.assertTrue(compile_again(self.id))
            self.assertFalse(compile_again(self.id))  # it has been invalidated
            self.assertEqual(fn(torch.ones(2)), torch.full((2,), 2.0))

    def test_other_entries_stay(self):
        fn, counter = self.compiled(dynamic=False)
        fn(torch.ones(2))
        first = self.id
        fn(torch.ones(3))
        self.assertTrue(compile_again(first))
        fn(torch.ones(3))
        self.assertEqual(counter.frame_count, 2)
        fn(torch.ones(2))
        self.assertEqual(counter.frame_count, 3)

    def test_times(self):
        fn, counter = self.compiled()
        with torch._dynamo.config.patch(recompile_limit=3 * MOST):
            for _ in range(MOST):
                fn(torch.ones(2))
                self.assertTrue(compile_again(self.id))
            fn(torch.ones(2))
            self.assertFalse(compile_again(self.id))
            self.assertEqual(counter.frame_count, MOST + 1)

    def test_limit_of_recompiles(self):
        """One place is left free for a frame that would be compiled anyway."""
        for limit, expected in ((2, False), (3, True)):
            torch._dynamo.reset()
            fn, _ = self.compiled()
            fn(torch.ones(2))
            with torch._dynamo.config.patch(recompile_limit=limit):
                self.assertIs(compile_again(self.id), expected)

    def test_where_nothing_may_be_compiled(self):
        fn, counter = self.compiled()
        fn(torch.ones(2))
        with torch._dynamo.config.patch(error_on_recompile=True):
            self.assertFalse(compile_again(self.id))
        with torch.compiler.set_stance("fail_on_recompile"):
            self.assertFalse(compile_again(self.id))
        self.assertFalse(compile_again(None))
        fn(torch.ones(2))
        self.assertEqual(counter.frame_count, 1)


if __name__ == "__main__":
    run_tests()
