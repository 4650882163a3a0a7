"""An operator in which a capture fails is found, kept in mind, and split off when its code is compiled again."""

import json
import os
import random
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.cache_key import overlay_key
from torch_overlay._inductor.relaunch import causes, compiled_region, coverage, split_off
from torch_overlay._inductor.relaunch.capture import culprit
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay.testing import simulated_gpu


STATE = {"device": None, "error": None, "replays": False}
KEPT = torch.zeros(4, 4)
UNSEEDED = random.Random(0)
UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be ..."


@torch.library.custom_op("culprits::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    device = STATE["device"]
    recording = getattr(device.thread, "recording", None) if device is not None else None
    if recording is not None:
        if STATE["error"] is None:
            device.broken = True
        else:
            raise STATE["error"]
    STATE.get("nodes", []).append(20)
    return x * 2


@torch.library.custom_op("culprits::escapes", mutates_args=())
def escapes(x: torch.Tensor) -> torch.Tensor:
    recording = getattr(STATE["device"].thread, "recording", None)
    if recording is not None:
        recording.written = True
    return x * 2


@torch.library.custom_op("culprits::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    """Computes outside of a capture in memory of its own, which the captured kernel reads."""
    if not STATE["replays"]:
        KEPT.copy_(x * 2)
    return KEPT.clone()


@torch.library.custom_op("culprits::rectifies", mutates_args={"x"})
def rectifies(x: torch.Tensor) -> None:
    """Its kernel leaves small numbers as they are, and isn't captured."""
    if not STATE["replays"]:
        x.relu_()


@torch.library.custom_op("culprits::varies", mutates_args=())
def varies(x: torch.Tensor) -> torch.Tensor:
    """Adds in an order that isn't fixed: the last bits differ from run to run."""
    return x * 2 * (1 + 1e-6 * UNSEEDED.random())


@torch.library.custom_op("culprits::doubles", mutates_args=())
def doubles(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@waits.register_fake
def _(x):
    return torch.empty_like(x)


class Private(TestCase):
    """A test with a cache directory of its own."""

    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=self.folder))
        self.addCleanup(split_off.forget)
        split_off.forget()

    def path(self):
        return Path(self.folder, split_off.FILE)


@instantiate_parametrized_tests
class TestCulprit(RelaunchTestCase, Private):
    SOURCE = region("x", "y = torch.mul(x, 3)", "z = torch.ops.culprits.waits.default(y)", "return (torch.add(z, x),)")

    def setUp(self):
        super().setUp()
        STATE.update(device=self.device, error=RuntimeError(UNSUPPORTED))
        self.addCleanup(STATE.update, device=None)

    def calls(self, run, times=3):
        for _ in range(times):
            x = torch.randn(4, 4)
            self.assertEqual(run([x])[0], x * 7)

    def test_it_is_named_with_what_it_did(self):
        run = self.runner(self.SOURCE)
        self.calls(run)
        (found,) = causes.refused()
        self.assertEqual((found.code, found.operator), ("operator", "culprits::waits.default"))
        did = "waits for the device, or allocates or frees its memory itself (CUDA error 900)"
        self.assertEqual(found.message, f"culprits::waits.default {did}")
        self.assertEqual(split_off.failed(), {"culprits::waits.default": did})
        self.assertEqual(dict(run.outside), {"warm-up": 1, "operator": 2})

    def test_capture_that_it_breaks_without_an_error(self):
        STATE["error"] = None
        self.calls(self.runner(self.SOURCE))
        (found,) = causes.refused()
        self.assertEqual(found.message, "culprits::waits.default breaks the capture")

    def test_no_memory_is_not_its_fault(self):
        STATE["error"] = torch.OutOfMemoryError("no memory")
        self.calls(self.runner(self.SOURCE), 2)
        self.assertEqual((causes.refused(), dict(split_off.failed())), ([], {}))
        self.calls(self.runner(self.SOURCE), 6)
        self.assertEqual([r.code for r in causes.refused()], ["out-of-memory"])

    def test_operator_that_all_models_are_made_of_is_not_split_off(self):
        """What has made it fail may be gone at the next call; a product that runs between graphs would stay."""

        def fail(x, y):
            if getattr(self.device.thread, "recording", None) is not None:
                raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
            return x * y

        library = self.enterContext(torch.library._scoped_library("aten", "IMPL"))
        source = self.SOURCE.replace("torch.ops.culprits.waits.default(y)", "torch.mm(y, torch.eye(4) * 2)")
        library.impl("mm", lambda a, b: fail(a, 2), "CPU")
        self.calls(self.runner(source), 6)
        (found,) = causes.refused()
        self.assertEqual((found.code, found.operator), ("capture", "aten::mm.default"))
        self.assertEqual(dict(split_off.failed()), {})

    def test_frame_that_is_compiled_again_is_no_refusal(self):
        run = self.runner(self.SOURCE)
        with (
            mock.patch.object(split_off, "compile_again", return_value=True),
            self.assertLogs(causes.log, "WARNING") as logs,
        ):
            self.calls(run)
        self.assertEqual(causes.refused(), [])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("from the next call on it runs between two graphs", logs.output[0])
        self.assertEqual(dict(run.outside), {"warm-up": 1, "operator": 2})

    def test_code_that_was_compiled_without_it_is_refused(self):
        """It is called where it can't be split off, in an operator of another kind."""
        split_off.remember("culprits::waits.default", "waits")
        run = self.runner(self.SOURCE)
        with mock.patch.object(split_off, "compile_again", return_value=True):
            self.calls(run)
        self.assertEqual([r.code for r in causes.refused()], ["operator"])

    def test_error_of_the_code_itself_is_no_operators(self):
        source = self.SOURCE.replace("return (", "check()\n    return (")

        def check():
            if getattr(self.device.thread, "recording", None) is not None:
                raise ValueError("no operator")

        STATE["device"] = None
        self.calls(self.runner(source, check=check), 6)
        (found,) = causes.refused()
        self.assertEqual((found.code, found.message), ("capture", "ValueError: no operator"))

    @parametrize("before", [0, 1, 4])
    @parametrize("after", [0, 3])
    def test_operator_that_launches_on_a_stream_of_its_own_choice(self, before, after):
        """Its kernel isn't captured, and no error says so."""
        names = ["doubles"] * before + ["escapes"] + ["doubles"] * after
        calls = "".join(f"    z = torch.ops.culprits.{name}.default(z) / 2\n" for name in names)
        source = self.SOURCE.replace("    z = torch.ops.culprits.waits.default(y)\n", f"    z = y * 2\n{calls}")
        self.calls(self.runner(source))
        (found,) = causes.refused()
        did = "launches on a stream of its own choice, where a capture does not see it"
        self.assertEqual(found.message, f"culprits::escapes.default {did}")
        self.assertEqual(split_off.failed(), {"culprits::escapes.default": did})

    def differs(self, *calls):
        """Call a region with these calls of operators, whose kernels outside of a capture no launch runs. Return what
        is split off, and what is refused."""
        execute = self.device.execute

        def replay(*args):
            with mock.patch.dict(STATE, replays=True):
                execute(*args)

        self.enterContext(mock.patch.object(self.device, "execute", replay))
        lines = "".join(f"    {call}\n" for call in calls)
        source = self.SOURCE.replace("    z = torch.ops.culprits.waits.default(y)\n", lines)
        run = self.runner(source)
        for _ in range(5):
            x = torch.randn(4, 4)
            before = torch.get_rng_state()
            wanted = x * 3
            self.assertEqual(run([x]), (wanted.relu() * 2 + x if "rectifies" in lines else wanted * 2 + x,))
            self.assertEqual(torch.get_rng_state(), before)
        self.assertEqual(run.launched() + sum(run.outside.values()), 5)
        return [*split_off.failed()], causes.refused()

    def test_operator_that_computes_in_memory_of_its_own(self):
        """A captured kernel reads it: nothing that the capture has placed is written."""
        failed, (found,) = self.differs("z = torch.ops.culprits.keeps.default(y)")
        self.assertEqual((failed, found.code), (["culprits::keeps.default"], "operator"))
        self.assertIn("culprits::keeps.default is called where a graph's first launch had other results", found.message)
        self.assertIn("launch on torch.cuda.current_stream()", found.message)

    def test_update_outside_of_a_capture_that_leaves_its_numbers_as_they_are(self):
        failed, (found,) = self.differs("torch.ops.culprits.rectifies.default(y); z = y * 2")
        self.assertEqual((failed, found.code), (["culprits::rectifies.default"], "operator"))

    def test_operator_in_the_middle_is_split_off_first(self):
        """A region that isn't cut there is refused; otherwise its parts are compared."""
        names = ["doubles", "waits", "keeps"]
        STATE["device"] = None
        calls = [f"z = torch.ops.culprits.{name}.default({'z / 2' if i else 'y'})" for i, name in enumerate(names)]
        failed, (found,) = self.differs(*calls)
        self.assertEqual((failed, found.code), (["culprits::waits.default"], "operator"))

    def test_operator_whose_last_bits_vary_has_a_graph(self):
        self.assertEqual(self.differs("z = torch.ops.culprits.varies.default(y)"), ([], []))

    def test_comparison_that_finds_no_memory_is_made_later(self):
        run = self.runner(self.SOURCE.replace("waits", "doubles"))
        with mock.patch.object(compiled_region, "clone_flat", side_effect=torch.OutOfMemoryError("no memory")):
            self.calls(run)
        self.assertEqual((run.launched(), causes.refused(), dict(split_off.failed())), (0, [], {}))
        self.calls(run)
        self.assertEqual(run.launched(), 3)

    def test_comparison_leaves_alone_what_the_code_writes_over(self):
        """A saved tensor is a static input of the backward, and the backward may write over it."""
        calls = "y = torch.ops.culprits.doubles.default(x)", "torch.mul(y, 3, out=x)", "return (torch.add(x, 1),)"
        run = self.runner(region("x", *calls), static=(0,), mutated=(0,), is_backward=True)
        for _ in range(4):
            x = torch.randn(4, 4)
            expected = x * 6 + 1
            self.assertEqual(run([x])[0], expected)
        self.assertEqual(run.launched(), 3)

    def test_device_that_can_not_record_is_no_error(self):
        """Nor is it one when the operator is looked for."""
        refusal = Unprovable("allocator", "this allocator can't")
        for failures in ([refusal] * 9, [RuntimeError("first"), *[refusal] * 9]):
            causes._refused.clear()
            with mock.patch.object(self.device, "new_recording", side_effect=failures):
                self.calls(self.runner(self.SOURCE))
            self.assertEqual([r.code for r in causes.refused()], ["allocator"])

    def refused_by_the_proof(self, node, source=SOURCE):
        STATE["device"] = None
        refusal = Unprovable("foreign", "it points elsewhere", node=node)
        with mock.patch.object(self.device, "prove", side_effect=refusal):
            self.calls(self.runner(source))
        return causes.refused()

    def test_operator_whose_kernel_the_proof_refuses(self):
        made = culprit.Culprit("culprits::waits.default", "f.py:3", "launches what it likes")
        with mock.patch.object(culprit, "find_launcher", return_value=made):
            (found,) = self.refused_by_the_proof("1 (kernel)")
        self.assertEqual((found.code, found.operator, found.line), ("operator", made.operator, "f.py:3"))
        self.assertEqual(dict(split_off.failed()), {"culprits::waits.default": "launches what it likes"})

    def test_operator_that_made_a_node(self):
        STATE.update(device=None, nodes=[])
        self.addCleanup(STATE.pop, "nodes")
        scope = {"torch": torch, "STATE": STATE}
        lines = ("STATE['nodes'].append(10)", "y = torch.ops.culprits.waits(x)", "STATE['nodes'].append(30)")
        exec("def region(x):\n    " + "\n    ".join(lines), scope)
        with culprit.Suspects(scope, lambda: False, nodes=lambda: list(STATE["nodes"])) as suspects:
            scope["region"](torch.randn(2))
        self.assertEqual(STATE["nodes"], [10, 20, 30])
        self.assertEqual(suspects.launcher(20, "did it"), culprit.Culprit("culprits::waits.default", "", "did it"))
        self.assertEqual([suspects.launcher(node, "") for node in (10, 30)], [None, None])

    @parametrize("node", ["0 (kernel)", "2 (kernel)", "17 (kernel)", "", "all"])
    def test_product_whose_kernel_the_proof_refuses_is_not_split_off(self, node):
        (found,) = self.refused_by_the_proof(node)
        self.assertEqual((found.code, found.operator, dict(split_off.failed())), ("foreign", "", {}))

    def test_errors_of_cuda_in_words(self):
        for number, (text, did) in culprit.ERRORS.items():
            error = RuntimeError(f"CUDA error: {text}, and so on")
            self.assertEqual(culprit.did(error), f"{did} (CUDA error {number})")
            error = RuntimeError("?")
            error.error_code = number
            self.assertEqual(culprit.did(error), f"{did} (CUDA error {number})")
        self.assertEqual(culprit.did(KeyError("a\nb")), "raises KeyError: 'a\\nb'")


@instantiate_parametrized_tests
class TestMemory(Private):
    """What failed is known in the next process."""

    def test_file(self):
        self.assertEqual(dict(split_off.failed()), {})
        split_off.remember("a::b.default", "waits")
        split_off.remember("a::c.out", "launches")
        split_off.remember("a::b.default", "something else")
        split_off.forget()
        self.assertEqual(dict(split_off.failed()), {"a::b.default": "waits", "a::c.out": "launches"})
        self.assertEqual(os.listdir(self.folder), [split_off.FILE])

    def test_file_of_several_ranks(self):
        """Two processes that share a cache begin at the same time, and each finds another operator."""
        split_off.remember("a::b.default", "waits")
        first, split_off._failed = split_off._failed, {}
        self.path().unlink()
        self.assertEqual(dict(split_off.failed()), {})
        split_off._failed, second = first, split_off._failed
        split_off.remember("a::c.default", "launches")
        split_off._failed = second
        split_off.remember("a::d.default", "allocates")
        self.assertEqual(dict(split_off.failed()), {"a::d.default": "allocates"})
        split_off.forget()
        self.assertEqual([*split_off.failed()], ["a::b.default", "a::c.default", "a::d.default"])

    def test_processes_of_one_number_write_files_of_their_own(self):
        """Containers share a cache, and have processes of the same number."""
        written = []

        def replace(source, target):
            written.append(source)
            os.rename(source, target)

        with mock.patch.object(split_off.os, "replace", replace):
            split_off.remember("a::b.default", "waits")
            split_off.remember("a::c.default", "launches")
        self.assertEqual(len(set(written)), 2)
        self.assertEqual({Path(path).parent for path in written}, {self.path().parent})

    @parametrize("text", ["", "[]", "{", '{"torch": "1.0", "operators": {"a::b": "x"}}', '{"operators": {}}', "..."])
    def test_file_of_another_kind_is_nothing(self, text):
        self.path().write_text(text.replace("...", "[" * 100_000))
        self.assertEqual(dict(split_off.failed()), {})
        split_off.remember("a::b.default", "waits")
        self.assertEqual(json.loads(self.path().read_text())["operators"], {"a::b.default": "waits"})

    def test_folder_that_cannot_be_written(self):
        self.path().mkdir()
        with self.assertLogs(split_off.log, "INFO") as logs:
            split_off.remember("a::b.default", "waits")
        self.assertIn("later processes will find out again", logs.output[0])
        self.assertEqual(os.listdir(self.folder), [split_off.FILE])
        self.assertEqual(dict(split_off.failed()), {"a::b.default": "waits"})

    def test_without_caches_nothing_is_read_or_written(self):
        split_off.remember("a::b.default", "waits")
        with inductor_config.patch(force_disable_caches=True):
            self.assertEqual(dict(split_off.failed()), {})
            split_off.remember("a::c.default", "waits")
            self.assertEqual(dict(split_off.failed()), {"a::c.default": "waits"})
        split_off.forget()
        self.assertEqual(dict(split_off.failed()), {"a::b.default": "waits"})

    def test_cache_keys_depend_on_it_where_graphs_are_asked_for(self):
        for graphs in (False, True):
            split_off.forget()
            self.path().unlink(missing_ok=True)
            with inductor_config.patch({"triton.cudagraphs": graphs}):
                before = overlay_key(None, False)
                split_off.remember("a::b.default", "waits")
                self.assertEqual(overlay_key(None, False) != before, graphs)


class TestCompiledAgain(Private):
    def compiled(self, before_run=lambda made: None):
        """A compiled function, and the ids of its compilations so far, which `before_run` gets at each run."""
        made = []

        def backend(gm, inputs):
            made.append(torch._guards.CompileContext.current_compile_id())

            def run(*args):
                before_run(made)
                return gm.forward(*args)

            return run

        torch._dynamo.reset()

        @torch.compile(backend=backend)
        def f(x):
            return x.sin() + 1

        return f, made

    def test_frame_is_compiled_at_its_next_call(self):
        f, made = self.compiled()
        x = torch.randn(4)
        f(x), f(x)
        self.assertEqual(len(made), 1)
        self.assertTrue(split_off.compile_again(made[0]))
        self.assertFalse(split_off.compile_again(made[0]), "it is invalid already")
        self.assertEqual(f(x), x.sin() + 1)
        f(x)
        self.assertEqual(len(made), 2)
        self.assertEqual(made[0].frame_id, made[1].frame_id)

    def test_while_its_code_runs(self):
        f, made = self.compiled(lambda made: len(made) > 1 or self.assertTrue(split_off.compile_again(made[0])))
        x = torch.randn(4)
        for _ in range(3):
            self.assertEqual(f(x), x.sin() + 1)
        self.assertEqual(len(made), 2)

    def test_no_more_often_than_dynamo_goes_along_with(self):
        for limit, most in ((8, 6), (100, split_off.MOST)):
            split_off.forget()
            f, made = self.compiled()
            x = torch.randn(4)
            with torch._dynamo.config.patch(recompile_limit=limit):
                f(x)
                again = 0
                while split_off.compile_again(made[-1]):
                    again += 1
                    f(x)
                self.assertEqual((again, len(made)), (most, most + 1))

    def test_not_where_compiling_again_is_an_error(self):
        f, made = self.compiled()
        x = torch.randn(4)
        f(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            self.assertFalse(split_off.compile_again(made[0]))
            f(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            self.assertFalse(split_off.compile_again(made[0]))
            f(x)
        self.assertEqual(len(made), 1)

    def test_code_that_dynamo_has_not_compiled(self):
        self.assertFalse(split_off.compile_again(None))
        self.assertFalse(split_off.compile_again(torch._guards.CompileId(frame_id=10**6, frame_compile_id=0)))


@instantiate_parametrized_tests
class TestPartitions(Private):
    """What is split off is listed with its code, operator and line; the rest keeps its graphs."""

    def split(self, fn, *extra, failed=(), graphs=2):
        with simulated_gpu() as gpu, config.patch(cudagraphs="relaunch"):
            for operator in failed:
                split_off.remember(operator, "waits")
            made = [each() for each in extra]
            x, w = torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
            torch.compile(fn, mode="reduce-overhead")(x, w, *made)
            seen = coverage.coverage()
            self.assertEqual(len(gpu.cudagraphs), graphs)
        (function,) = seen.functions
        lines = Path(__file__).read_text().splitlines()
        found = []
        for each in function.outside:
            name, _, rest = each.line.partition(".py:")
            self.assertEqual(name + ".py", __file__)
            number, _, text = rest.partition(": ")
            self.assertEqual(lines[int(number) - 1].strip(), text)
            found.append((each.code, each.operator, text))
        return found

    @pytest.mark.each_hook
    def test_cond(self):
        def f(x, w, p):
            y = (x @ w).sin()
            y = torch.cond(p, torch.sin, torch.rand_like, (y,))
            return (y @ w).cos()

        found = self.split(f, lambda: torch.tensor(True, device="cuda"))
        line = "y = torch.cond(p, torch.sin, torch.rand_like, (y,))"
        self.assertEqual(found, [("split-control-flow", "cond", line)])

    @parametrize("device", ["cuda", "cpu"])
    def test_while_loop(self, device):
        def f(x, w, n):
            y = (x @ w).sin()
            y = torch.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (n, y))[1]
            return (y @ w).cos()

        with mock.patch.object(torch, "while_loop", torch._higher_order_ops.while_loop, create=True):
            ((code, operator, _),) = self.split(f, lambda: torch.tensor(0, device=device))
        self.assertEqual((code, operator), ("split-control-flow", "while_loop"))

    def test_operator_that_failed(self):
        def f(x, w):
            y = (x @ w).sin()
            y = torch.ops.culprits.waits(y)
            return (y @ w).cos()

        self.assertEqual(
            self.split(f, failed=["culprits::waits.default"]),
            [("split-failed", "culprits::waits.default", "y = torch.ops.culprits.waits(y)")],
        )
        self.assertEqual(self.split(f, graphs=1), [])

    def test_operator_of_torch_that_failed(self):
        def f(x, w):
            y = (x @ w).sin()
            y = torch.linalg.qr(y)[0]
            return (y @ w).cos()

        (found,) = self.split(f, failed=["aten::linalg_qr.default"])
        self.assertEqual(found, ("split-failed", "aten::linalg_qr.default", "y = torch.linalg.qr(y)[0]"))

    def test_size_that_depends_on_data(self):
        def f(x, w):
            y = (x @ w).sin()
            z = y.nonzero()
            return z.sum() + (y @ w).cos().sum()

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = self.split(f)
        self.assertEqual(found[0], ("split-data-dependent", "aten::nonzero.default", "z = y.nonzero()"))

    def test_host(self):
        def f(x, w):
            y = (x @ w).sin()
            n = torch.arange(8).float().exp()
            return (y @ w).cos(), n

        ((code, _, text),) = self.split(f, graphs=1)
        self.assertEqual((code, text), ("split-host", "n = torch.arange(8).float().exp()"))
