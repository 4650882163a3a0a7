# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_relaunch import policy, refusals
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool
from torch.testing._internal.common_utils import run_tests, TestCase


class Policy(RelaunchPolicy):
    """Makes no graph: the code stands for code without kernels, once it is wrapped."""

    def cudagraphify(self, model, example_inputs, static_input_idxs, **kwargs):
        kwargs["kernel_free_cudagraph"] = True
        return super().cudagraphify(model, example_inputs, static_input_idxs, **kwargs)


class Other(CUDAGraphPolicy):
    def should_wrap(self, compiled_graph):
        return False


class TestSwitch(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        self.enterContext(inductor_config.patch({"triton.cudagraphs": True}))
        self.addCleanup(policy.forget)

    def loaded(self, reason=None, **changes):
        """Code of a forward as it comes from a cache: without what it was compiled
        with. `reason`: why Inductor makes no graph of it."""
        code = CompiledFxGraph.__new__(CompiledFxGraph)
        code.cudagraph_info = SimpleNamespace(
            cudagraph_fail_reasons=[] if reason is None else [reason],
            placeholders=[],
            stack_traces=[],
        )
        code.disabled_cudagraphs_reason = None
        code.device_types, code.device_idxs = {"cuda"}, {0}
        code.kernel_free_cudagraph = False
        code.fx_kwargs = {
            "is_backward": False,
            "is_inference": False,
            "static_input_idxs": (),
        }
        code.current_callable = lambda inputs: "compiled"
        code.compiled_fn_runner = code.partition_maps = None
        code.inputs_to_check, code.output_strides = (), None
        code.mutated_input_idxs, code.constants = set(), {}
        code.opaque_value_type_classes = {}
        for name, value in changes.items():
            setattr(code, name, value)
        return code

    def finish(self, code, used, switch):
        constants, given = CompiledFxGraphConstants(), {"cudagraphs": switch}
        with inductor_config.patch(cudagraph_policy=used):
            code.post_compile([], constants, given | {"is_backward": False})
            used.wrap_output(code)
        return bool(switch)

    def test_forward_without_a_graph(self):
        self.assertTrue(self.finish(self.loaded("a reason"), Policy(), BoxedBool(True)))
        (said,) = refusals.refused()
        self.assertIn("a reason", said.message)

    def test_forward_that_was_disabled_when_it_was_compiled(self):
        code = self.loaded(cudagraph_info=None, disabled_cudagraphs_reason="a reason")
        for switch in (BoxedBool(True), BoxedBool(False)):
            self.assertTrue(self.finish(code, Policy(), switch))

    def test_forward_with_a_graph(self):
        self.assertTrue(self.finish(self.loaded(), Policy(), BoxedBool(True)))
        self.assertEqual(refusals.refused(), [])

    def test_code_that_did_not_ask(self):
        code = self.loaded(cudagraph_info=None)
        self.assertFalse(self.finish(code, Policy(), BoxedBool(False)))

    def test_other_policies(self):
        self.assertFalse(self.finish(self.loaded("a reason"), Other(), BoxedBool(True)))

    def test_error_while_code_is_finished(self):
        """The thread keeps nothing of it."""
        code = self.loaded(current_callable=None)
        with self.assertRaisesRegex(AssertionError, "current_callable"):
            self.finish(code, Policy(), BoxedBool(True))
        self.assertIsNone(policy._thread.graph)


if __name__ == "__main__":
    run_tests()
