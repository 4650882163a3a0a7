"""The programs in examples/: each compiles as one region, is planned as its text promises, and says so as a script."""

import importlib.util
import re
import unittest
from types import ModuleType

import torch

import form
import moe_experts
import prefetch_loop
import train_moe_experts
import train_prefetch_loop
import train_two_batches
import transformer_side_branch
from torch_overlay._inductor.streams.plan import Plan
from torch_overlay.analysis.memory_report import account
from torch_overlay.testing import compile_only, Compiled, simulated_gpu


def printed(example: str) -> str:
    """By the example as a script, without a GPU."""
    folder = str(form.ROOT / "examples")
    code = f"import runpy, sys; sys.path.insert(0, {folder!r})\n"
    code += f"runpy.run_path({folder + '/' + example!r}, run_name='__main__')"
    result = form.fork_python(code, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


class ExampleTest(unittest.TestCase):
    """Tests of one example, compiled once."""

    __test__ = False

    example: ModuleType
    result: Compiled
    plan: Plan

    backward = False

    def __init_subclass__(cls) -> None:
        cls.__test__ = "example" in vars(cls)

    def test_compiles_as_one_region_without_a_graph_break(self) -> None:
        self.assertEqual(self.result.graph_breaks, [])
        self.assertEqual(len(self.result.plans), 1 + self.backward)
        if self.backward:
            self.assertEqual([r.kind for r in self.result.regions], ["forward", "backward"])

    @form.overlay_only
    @form.slow
    def test_script_prints_its_plans(self) -> None:
        self.assertEqual(printed(f"{self.example.__name__}.py").count("waits before"), 1 + self.backward)

    @classmethod
    def setUpClass(cls) -> None:
        with simulated_gpu():
            function, args = cls.example.make()
            cls.result = compile_only(function, *args, fullgraph=False, backward=cls.backward)
        cls.plan = cls.result.plans[-1]

    def operations(self, stream: int) -> int:
        return sum(op.stream == stream for op in self.plan.ops)


class TestPrefetchLoop(ExampleTest):
    example = prefetch_loop

    def test_copy_runs_on_the_transfer_stream_and_is_asynchronous(self) -> None:
        (copy,) = [op for op in self.plan.ops if op.stream == 1 and op.name != "record_event"]
        self.assertFalse(copy.blocking)
        self.assertRegex(self.result.calls(), r"\.copy_\(\w+, True\)")

    def test_batch_is_read_only_after_what_the_transfer_stream_held_before(self) -> None:
        first = next(i for i, op in enumerate(self.plan.ops) if op.stream == 0)
        waits = [event for event, stream in self.plan.waits_before(first) if stream == 0]
        self.assertEqual([(event.stream, event.after) for event in waits], [(1, -1)])

    def test_users_event_is_recorded_behind_the_copy(self) -> None:
        names = [op.name for op in self.plan.ops if op.stream == 1]
        self.assertEqual(names[-1], "record_event")
        self.assertEqual(len(names), 2)

    def test_record_stream_of_the_user_survives(self) -> None:
        self.assertEqual(self.result.calls().count(".record_stream(stream0)"), 1)

    def test_batches_are_pinned_and_a_buffer_is_refilled_only_after_its_event(self) -> None:
        with simulated_gpu() as gpu:
            batches = prefetch_loop.PinnedBatches(torch.randn(40, 3), batch=8, slots=2)
            self.assertEqual(len(batches), 5)
            seen = []
            for host, copied in batches:
                self.assertTrue(host.is_pinned())
                copied.record()
                seen.append(host)
            self.assertEqual([id(host) for host in seen], [id(seen[i % 2]) for i in range(5)])
            log = [line for line in gpu.device_log if "event" in line]
        first, second = "event 1", "event 2"
        turns = [first, second, first, second, first]
        expected = [line for event in turns for line in (f"synchronize {event}", f"record {event} on stream 0")]
        self.assertEqual(log, expected)

    @form.overlay_only
    def test_script_prints_its_plans(self) -> None:
        self.assertIn("waits before", printed(f"{self.example.__name__}.py"))


class TestMoeExperts(ExampleTest):
    example = moe_experts

    def test_every_expert_keeps_its_stream(self) -> None:
        self.assertEqual(self.plan.streams, tuple(range(moe_experts.EXPERTS + 1)))
        self.assertEqual(len({self.operations(stream) for stream in range(1, moe_experts.EXPERTS + 1)}), 1)

    def test_one_fork_event_serves_all_experts(self) -> None:
        (fork,) = [event for event in self.plan.events if event.stream == 0]
        self.assertEqual(len(fork.waits), moe_experts.EXPERTS)
        self.assertEqual(len(self.plan.events), moe_experts.EXPERTS + 1)

    def test_experts_do_not_wait_for_each_other(self) -> None:
        waits = {(event.stream, stream) for event in self.plan.events for _, stream in event.waits}
        self.assertEqual([pair for pair in waits if 0 not in pair], [])


class TestTransformerSideBranch(ExampleTest):
    example = transformer_side_branch

    def test_shared_expert_runs_on_the_side_stream_and_the_block_does_not(self) -> None:
        self.assertEqual(self.operations(1), 4)  # three matrix products, and the gate
        self.assertGreater(self.operations(0), 10)

    def test_fork_and_join_cost_one_event_each(self) -> None:
        self.assertEqual(len(self.plan.events), 2)


class TrainingTest(ExampleTest):
    """Of a training example; `plan` is its backward's."""

    backward = True

    def joins(self) -> set[int]:
        """Streams that the current one waits for at the backward's exit or before its last operation."""
        return {event.stream for event in self.plan.events for _, stream in event.waits if stream == 0}


class TestTrainPrefetchLoop(TrainingTest):
    example = train_prefetch_loop

    def test_auxiliary_loss_and_its_gradients_run_on_the_side_stream(self) -> None:
        for plan in self.result.plans:
            self.assertGreater(sum(op.stream == 1 for op in plan.ops), 1)
        self.assertIn(1, self.joins())

    def test_copies_are_a_step_ahead_and_asynchronous(self) -> None:
        with simulated_gpu() as gpu:
            batches = [(torch.randn(4, 3).pin_memory(), torch.zeros(4).pin_memory()) for _ in range(3)]
            prefetcher = train_prefetch_loop.Prefetcher(batches, overlapped=True)
            copies: list[object] = []
            real = prefetcher.copy
            prefetcher.copy = lambda batch: copies.append(batch) or real(batch)  # type: ignore[method-assign]
            seen = [len(copies) for _ in prefetcher]
            log = [line for line in gpu.device_log if "wait" in line]
        self.assertEqual(seen, [2, 3, 3])
        self.assertEqual(len(log), 3)


@form.slow
class TestTrainTwoBatches(TrainingTest):
    example = train_two_batches

    def test_halves_do_not_wait_for_each_other_in_the_forward(self) -> None:
        waits = {(event.stream, stream) for event in self.result.plans[0].events for _, stream in event.waits}
        self.assertEqual([pair for pair in waits if 0 not in pair], [])

    @form.slow
    def test_both_halves_have_their_own_backward(self) -> None:
        self.assertEqual(self.operations(1), self.operations(2))
        self.assertGreater(self.operations(1), 20)
        self.assertEqual(self.joins(), {1, 2})


@form.slow
class TestTrainMoeExperts(TrainingTest):
    example = train_moe_experts

    @form.slow
    def test_every_expert_s_gradients_are_computed_on_its_stream(self) -> None:
        experts = range(1, moe_experts.EXPERTS + 1)
        self.assertEqual({s for s in self.plan.streams if s}, set(experts))
        self.assertEqual(len({self.operations(stream) for stream in experts}), 1)
        self.assertEqual(self.joins(), set(experts))

    def test_experts_do_not_wait_for_each_other(self) -> None:
        waits = {(event.stream, stream) for event in self.plan.events for _, stream in event.waits}
        self.assertEqual([pair for pair in waits if 0 not in pair], [])

    def test_streams_cost_little_memory(self) -> None:
        for plan in self.result.plans:
            memory = account(plan)
            self.assertLess(memory.peak, 1.05 * memory.peak_on_one_stream)

    @form.overlay_only
    @form.slow
    def test_script_prints_its_plans(self) -> None:
        text = printed(f"{self.example.__name__}.py")
        self.assertIn("waits before", text)
        self.assertIn("at the peak", text)


class TestOffloadedTransformer(unittest.TestCase):
    @form.overlay_only
    @form.slow
    def test_script_says_what_waits_on_the_host_and_when_it_is_copied(self) -> None:
        text = printed("offloaded_transformer.py")
        self.assertRegex(text, r"\d+ saved tensors, [\d.]+ MB, wait on the host")
        self.assertRegex(text, r"mm +\d+\.\d MB   out \d+ / \d+ of \d+ +back \d+ / \d+ of \d+")


@form.overlay_only
class TestGraphs(unittest.TestCase):
    """Examples of CUDA graphs, as scripts without a GPU: their text about the simulated one."""

    def rows(self, text: str) -> dict[str, list[str]]:
        """Calls, calls by graph and graphs of each compiled function."""
        found = re.findall(
            r"^(\w+ of compiled frame \S+) .* (\d+) +(\d+) +\d+ +\d+ +(\d+) +\d+ +[\d.]+$", text, re.MULTILINE
        )
        return {name: [*counts] for name, *counts in found}

    def test_item_is_found_at_its_line_and_its_removal_compared(self) -> None:
        text = printed("remove_item.py")
        self.assertRegex(text, r"1\. \[graph-break\] .*Tensor\.item\(\)[^\n]*\n +\S+remove_item\.py:\d+\n")
        self.assertRegex(text, r"First: without_item: .*graph breaks 1 -> 0, waits of the host 1 -> 0")

    def test_lengths_share_one_graph_where_all_is_pointwise(self) -> None:
        rotated, model = self.rows(printed("varying_lengths.py")).values()
        self.assertEqual(rotated, ["10", "10", "1"])
        self.assertEqual(model, ["10", "6", "1"])  # each of four further lengths has run once as compiled

    @form.slow
    def test_decoding_steps_of_two_caches_are_one_graph(self) -> None:
        self.assertEqual([*self.rows(printed("generate_static_cache.py")).values()], [["30", "30", "1"]])

    @form.slow
    def test_function_that_was_captured_by_hand_is_relaunched(self) -> None:
        text = printed("graph_by_hand.py")
        self.assertRegex(text, r"relaunched +\d+ µs a call")
        self.assertEqual([*self.rows(text).values()], [["104", "104", "1"]])

    @form.slow
    def test_profile_names_the_launches_of_each_step(self) -> None:
        text = printed("profile_step.py")
        for name in ("step", "forward of compiled frame 0/0", "backward of compiled frame 0/0"):
            self.assertIn(f"   3 x {name}\n", text)

    @form.slow
    def test_blocks_under_fsdp2_are_graphs(self) -> None:
        text = printed("train_ranks.py")
        self.assertIn("in_fsdp2\n100.0 %", text)
        self.assertEqual(sum(int(calls) for calls, *_ in self.rows(text).values()), 2 * 3 * 5)

    @form.slow
    def test_trainer_is_two_launches_for_each_batch(self) -> None:
        text = printed("trainer.py")
        if importlib.util.find_spec("accelerate") is None:
            self.assertEqual(text, "The Trainer needs accelerate, which isn't installed: pip install accelerate\n")
            self.skipTest("accelerate is not installed")
        self.assertEqual([*self.rows(text).values()], [["16", "16", "1"]] * 2)

    @form.slow
    def test_quantised_weights_are_in_one_graph(self) -> None:
        text = printed("quantized.py")
        if importlib.util.find_spec("torchao") is None:
            self.assertEqual(text, "This example needs torchao, which isn't installed: pip install torchao\n")
            self.skipTest("torchao is not installed")
        self.assertEqual([*self.rows(text).values()], [["6", "6", "1"]])
