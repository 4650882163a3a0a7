# Owner(s): ["module: inductor"]

import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import cudagraph_utils, output_code, scheduler, utils
from torch._inductor.cudagraph_relaunch import coverage, describe, policy, refusals
from torch._inductor.cudagraph_relaunch import runner as runners
from torch._inductor.cudagraph_relaunch.partitions import Partitions, SplitOff
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy, why_not
from torch.testing._internal.common_utils import run_tests, TestCase


KNOWN = {"device_index": 0, "is_backward": False, "is_inference": True}


class Runner:
    """Stands for the runner of a region."""

    made = []

    def __init__(self, model, code):
        self.model, self.code, self.calls = model, code, 0
        self.outside = {}
        self.made.append(weakref.ref(self))

    def __call__(self, inputs):
        self.calls += 1
        return self.model(inputs)

    def launched(self):
        return self.calls

    def graphs(self):
        return []

    def describe_sizes(self):
        return ""


def compiled_graph(**changes):
    """Compiled code as a policy sees it."""
    found = {
        "cudagraph_info": SimpleNamespace(
            cudagraph_fail_reasons=[], placeholders=[], stack_traces=[]
        ),
        "disabled_cudagraphs_reason": None,
        "device_types": {"cuda"},
        "device_idxs": {0},
        "kernel_free_cudagraph": False,
        "fx_kwargs": {
            "is_backward": False,
            "is_inference": True,
            "cudagraphs": utils.BoxedBool(False),
        },
        "current_callable": lambda inputs: "compiled",
        "partition_maps": None,
    }
    return SimpleNamespace(**found | changes)


class PolicyTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        self.enterContext(mock.patch.object(coverage, "live", weakref.WeakSet()))
        self.enterContext(mock.patch.object(runners, "Runner", Runner))
        for name in ("index_now", "written_index"):
            self.enterContext(mock.patch.object(describe, name, lambda device: device))
        self.enterContext(mock.patch.object(Runner, "made", []))
        self.policy = RelaunchPolicy()

    def tearDown(self):
        policy.forget()
        super().tearDown()

    def wrap(self, graph, **kwargs):
        """What Inductor does with a policy; returns the code that it calls."""
        if self.policy.should_wrap(graph) and not graph.disabled_cudagraphs_reason:
            graph.current_callable = self.policy.cudagraphify(
                graph.current_callable, [], (), **KNOWN | kwargs
            )
        self.assertIs(self.policy.wrap_output(graph), graph)
        return graph.current_callable

    def said(self):
        return [(each.reason, each.message) for each in refusals.refused()]


class TestWrapping(PolicyTestCase):
    def test_whole_code(self):
        run = self.wrap(compiled_graph())
        self.assertIsInstance(run, Runner)
        self.assertEqual(run([]), "compiled")
        (function,) = coverage.coverage().functions
        self.assertEqual((function.calls, self.said()), (1, []))

    def test_partitions(self):
        parts = [
            SimpleNamespace(input_index_mapping=[k], output_index_mapping=[[k]])
            for k in (0, 1)
        ]
        made = []

        def apply(fns):
            made.extend(fn(lambda inputs: "a partition") for fn in fns)

        graph = compiled_graph(partition_maps=parts, recursively_apply_fns=apply)
        model = graph.current_callable
        given = {"placeholders": [SimpleNamespace(users=())] * 2}
        given |= {"stack_traces": ["", ""], "mutated_input_idxs": (1,)}
        with inductor_config.patch(graph_partition=True):
            self.assertIs(self.wrap(graph, **given), model)
        self.assertEqual([run.code.mutated_inputs for run in made], [(), (0,)])
        self.assertEqual(made[1]([]), "a partition")
        self.assertEqual(len(coverage.coverage().functions[0].regions), 2)

    def test_code_without_kernels(self):
        for changes in ({"kernel_free_cudagraph": True}, {"device_types": {"cpu"}}):
            graph = compiled_graph(**changes, disabled_cudagraphs_reason="a reason")
            self.assertEqual(self.wrap(graph)([]), "compiled")
        model = self.policy.cudagraphify(len, [], (), kernel_free_cudagraph=True)
        self.assertIs(model, len)
        self.assertEqual((self.said(), Runner.made), ([], []))

    def test_code_that_did_not_ask(self):
        graph = compiled_graph(cudagraph_info=None)
        model = graph.current_callable
        self.assertTrue(self.policy.should_wrap(graph))
        self.policy.wrap_output(graph)
        self.assertIs(graph.current_callable, model)
        self.assertEqual((self.said(), coverage.coverage().functions), ([], ()))

    def test_error_while_code_is_wrapped(self):
        self.policy.should_wrap(compiled_graph())
        policy.forget()
        other = compiled_graph()
        model = other.current_callable
        self.policy.wrap_output(other)  # which nobody asked about
        self.assertIs(other.current_callable, model)
        self.assertIsNone(policy._thread.graph)

    def test_buffers_of_kernels_that_run_side_by_side(self):
        known = {"is_inference": True, "device_types": {"cpu", "cuda"}}
        for changes, concurrency, graphs, expected in (
            ({}, True, True, True),
            ({}, False, True, False),
            ({}, True, False, False),
            ({"is_inference": False}, True, True, False),
            ({"device_types": {"cpu"}}, True, True, False),
        ):
            options = {
                "triton.cudagraph_concurrency": concurrency,
                "triton.cudagraphs": graphs,
            }
            with inductor_config.patch(options):
                found = policy.own_buffers(SimpleNamespace(**known | changes))
            self.assertIs(found, expected)

    def test_whose_policy_is_set(self):
        for made, expected in ((self.policy, True), (None, False)):
            with inductor_config.patch(cudagraph_policy=made):
                self.assertIs(policy.is_set(), expected)

    def test_rewrites(self):
        graph, switch = compiled_graph(cudagraph_info=None), utils.BoxedBool(True)
        made, copies = [("resident", "model.py:3")], SimpleNamespace(copies=2)
        with (
            inductor_config.patch(cudagraph_policy=self.policy),
            policy.wrapping(graph, switch, made, copies),
        ):
            self.run_ = self.wrap(graph)
        (function,) = coverage.coverage().functions
        self.assertEqual(function.rewrites, (("resident", "model.py:3"),))
        self.assertEqual(function.copies, 2)


class TestRefusals(PolicyTestCase):
    def test_reason_of_inductors(self):
        graph = compiled_graph()
        graph.cudagraph_info.cudagraph_fail_reasons = ["mutated inputs", "an op"]
        run = self.wrap(graph)
        ((reason, message),) = self.said()
        self.assertEqual(reason, "inductor")
        self.assertTrue(message.startswith("mutated inputs, an op; "))
        self.assertIn("cudagraph_support_input_mutation = True allows it", message)
        self.assertEqual([run([]), run([])], ["compiled"] * 2)
        ((outside,),) = (f.outside for f in coverage.coverage().functions)
        self.assertEqual((outside.code, outside.calls), ("inductor", 2))
        # The backward gets its own decision.
        self.assertTrue(graph.fx_kwargs["cudagraphs"].value)

    def test_reason_with_a_trace(self):
        said = "disabling cudagraphs due to incompatible op. Found from : \n  a trace"
        found = why_not(compiled_graph(disabled_cudagraphs_reason=said))
        advice = "torch._inductor.config.graph_partition = True splits it off"
        self.assertEqual(found, ("inductor", f"incompatible op; {advice}"))

    def test_decision_that_nobody_explains(self):
        graph = compiled_graph()
        self.policy.should_wrap(graph)
        self.policy.wrap_output(graph)  # cudagraphify() was not called
        said = "Inductor disabled it for this code"
        self.assertEqual(self.said(), [("inductor", said)])

    def test_code_that_is_all_split_off(self):
        for rows, why in (
            ([], "Inductor does not say why"),
            ([("split-host", "CPU ops")] * 2, "CPU ops"),
            (
                [("split-streams", "a stream"), ("split-host", "CPU ops")],
                "a stream; CPU",
            ),
            ([("split-streams", "a stream")], None),
        ):
            rows = tuple(SplitOff(code, text, "", "", 1) for code, text in rows)
            notes = Partitions((), rows).plain()
            graph = compiled_graph(partition_maps=[], relaunch_partitions=notes)
            with inductor_config.patch(graph_partition=True):
                found = why_not(graph)
                self.assertEqual(found is None, why is None)
                if found is not None:
                    self.assertEqual(found[0], "split")
                    self.assertIn(f"all of it is split off: {why}", found[1])
                    self.wrap(graph)
        self.assertEqual([reason for reason, _ in self.said()], ["split"] * 3)

    def test_error_in_place_of_a_refusal(self):
        graph = compiled_graph(disabled_cudagraphs_reason="an op")
        with (
            inductor_config.patch({"triton.cudagraph_or_error": True}),
            self.assertRaisesRegex(RuntimeError, r"\[inductor\]: an op"),
        ):
            self.policy.should_wrap(graph)

    def test_code_that_a_policy_alone_can_not_capture(self):
        def streams(inputs):
            return _get_stream_by_index(0)  # noqa: F821

        def attention(inputs):
            aten = torch.ops.aten
            return aten._scaled_dot_product_efficient_attention_backward(*inputs)

        for model, is_inference, is_noted, exchanges, refused in (
            (streams, True, False, [len], True),
            (streams, True, True, [], True),
            (streams, True, True, [len], False),  # captures know of streams
            (attention, True, False, [], False),
            (attention, False, False, [], True),
            (attention, False, True, [], False),
        ):
            graph = compiled_graph(current_callable=model)
            if is_noted:  # it was compiled for relaunch
                graph.relaunch_partitions = ()
            refusals._refused.clear()
            with mock.patch.object(policy, "exchanges", exchanges):
                run = self.wrap(graph, is_inference=is_inference)
            self.assertIs(isinstance(run, Runner), not refused)
            said = [reason for reason, _ in self.said()]
            self.assertEqual(said, ["policy-alone"] * refused)

    def test_cpp_wrapper(self):
        policy.refuse_cpp_wrapper()
        ((reason, message),) = self.said()
        self.assertEqual(reason, "cpp-wrapper")
        self.assertIn("torch._inductor.config.cpp_wrapper is on", message)


class TestPrograms(PolicyTestCase):
    """Code for the host, whose operators are called as they are, is taken for code of
    a device."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        post_compile = output_code.CompiledFxGraph.post_compile

        def on_device(graph, *args):
            graph.device_idxs = [0]
            post_compile(graph, *args)

        for owner, name, value in (
            (scheduler.BaseSchedulerNode, "is_gpu", lambda node: True),
            (
                cudagraph_utils,
                "check_multiple_devices_or_any_cpu_nodes",
                lambda _: None,
            ),
            (output_code.CompiledFxGraph, "post_compile", on_device),
        ):
            self.enterContext(mock.patch.object(owner, name, value))
        options = {
            "fallback_by_default": True,
            "triton.cudagraphs": True,
            "cudagraph_policy": self.policy,
            "fx_graph_cache": False,
            "graph_partition": False,
        }
        self.enterContext(inductor_config.patch(options))
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=False))

    def test_training(self):
        def fn(x, w):
            return ((x @ w).sin() + x).sum()

        compiled = torch.compile(fn)
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        for _ in range(3):
            got, wanted = (torch.autograd.grad(f(x, w), w) for f in (compiled, fn))
            self.assertEqual(got, wanted)
        made = [run() for run in Runner.made]
        self.assertEqual([run.calls for run in made], [3, 3])
        self.assertEqual([run.code.is_backward for run in made], [False, True])
        names = [run.code.name.partition(" of ")[0] for run in made]
        self.assertEqual(names, ["forward", "backward"])
        self.assertIn("test_cudagraph_relaunch_policy.py", made[0].code.source)
        # The user sees the first output; the others are saved.
        self.assertEqual(min(made[0].code.saved_outputs), 1)

    def test_inference(self):
        compiled = torch.compile(lambda x, w: (x @ w).relu_())
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        with torch.no_grad():
            self.assertEqual(compiled(x, w), (x @ w).relu())
        (run,) = (run() for run in Runner.made)
        self.assertTrue(run.code.name.startswith("inference of compiled frame 0/0"))


if __name__ == "__main__":
    run_tests()
