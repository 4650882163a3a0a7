# Owner(s): ["module: inductor"]

import ast
import inspect
from unittest import mock

import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_relaunch import (
    capture,
    checks,
    prove,
    refusals,
    signatures,
)
from torch._inductor.cudagraph_relaunch.causes import CAUSES, of_partition
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.nodes import Refusal
from torch._inductor.cudagraph_relaunch.refusals import refuse, Refused
from torch.testing._internal.common_utils import run_tests, TestCase


CODE = Code("forward of 0/0", 0, source="model.py:3: y = f(x)")


def raised(module):
    """The codes of the refusals that a module raises."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        name = getattr(getattr(node, "func", None), "id", "")
        if name == "Refusal" and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


class TestCauses(TestCase):
    def test_refusals_have_causes(self):
        modules = capture, checks, prove, signatures
        codes = {code for module in modules for code in raised(module)}
        self.assertGreater(len(codes), 8)
        self.assertEqual(codes - CAUSES.keys(), set())

    def test_inductors_reasons(self):
        for reason, code in (
            ("cpu ops", "split-host"),
            ("Switch ops", "split-control-flow"),
            ("cross-device ops", "split-devices"),
            ("custom partition op: a::b", "split-named"),
            ("unbacked binding ops", "split-data-dependent"),
            ("CUDAGraph-unsafe custom ops", "split-unsafe"),
            ("dynamic shape ops", "split-dynamic"),
            ("something new", "split-other"),
        ):
            self.assertEqual(of_partition(reason), code)
            self.assertIn(code, CAUSES)

    def test_options_that_remedies_name_are_there(self):
        text = " ".join(cause.remedy for cause in CAUSES.values())
        self.assertIn("torch._inductor.config.triton.cudagraph_templates", text)
        self.assertIn("TORCH_LOGS=inductor", text)


class TestRefusals(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        self.before = counters["inductor"]["cudagraph_refusals"]

    def test_each_is_logged_once_and_all_are_counted(self):
        first = Refused(CODE, "kept", "512 bytes are still in use")
        second = Refused(CODE, "operator", "a::b waits", "a::b", "model.py:7")
        with self.assertLogs(refusals.log, "WARNING") as logs:
            for found in (first, first, second):
                refuse(found)
        self.assertEqual(len(logs.output), 2)
        self.assertEqual(refusals.refused(), [first, second])
        self.assertEqual(counters["inductor"]["cudagraph_refusals"], self.before + 3)
        begin = "forward of 0/0 runs without a CUDA graph [kept]: 512 bytes are"
        self.assertEqual(
            refusals.refusals()[0],
            f"{begin} still in use (the region begins at model.py:3: y = f(x))",
        )
        self.assertTrue(str(second).endswith("[operator]: a::b waits (model.py:7)"))
        self.assertEqual(first.remedy, CAUSES["kept"].remedy)

    def test_many_are_not_kept(self):
        self.enterContext(mock.patch.object(refusals, "_MOST_REFUSED", 2))
        with self.assertLogs(refusals.log, "WARNING") as logs:
            for number in range(4):
                refuse(Refused(CODE, "kept", f"{number} bytes"))
        self.assertEqual((len(logs.output), len(refusals.refused())), (4, 2))

    def test_graphs_or_an_error(self):
        with (
            inductor_config.patch({"triton.cudagraph_or_error": True}),
            self.assertRaisesRegex(RuntimeError, "without a CUDA graph .kept."),
        ):
            refuse(Refused(CODE, "kept", "512 bytes"))
        self.assertEqual(len(refusals.refused()), 1)


class TestChecks(TestCase):
    def test_collectives(self):
        def call(args):
            return ops._c10d_functional.wait_tensor(args[0])  # noqa: F821

        with self.assertRaisesRegex(Refusal, "collectives ._c10d_functional") as caught:
            checks.check(call)
        self.assertEqual(caught.exception.reason, "collective")
        checks.check(lambda args: args)
        checks.check(mock.Mock())  # there is no code to look at

    def test_other_checks(self):
        def refuse(model):
            self.assertIn("kernel", checks.names_in(model))
            raise Refusal("streams", "it has to order the caller's streams")

        with (
            mock.patch.object(checks, "checks", [refuse]),
            self.assertRaisesRegex(Refusal, "the caller's streams"),
        ):
            checks.check(lambda args: args.kernel)


if __name__ == "__main__":
    run_tests()
