"""Silent bugs of stock PyTorch in backwards with streams are gone, and the tests that say so fail on stock.

The numbers are those of the project's list of upstream's silent bugs. Others of the list have their tests where they
belong: S2 (memory reused across streams) in `test_user_streams.py`, S6 (cache keys) in `test_cache_key.py`, S7
(objects kept alive) in `test_streams.py`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import upstream_bugs
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form


NAMES = [check.__name__ for check in upstream_bugs.CHECKS]


@functools.cache
def found_on_stock() -> dict[str, list[str]]:
    """What the checks find without the overlay, in a process of its own."""
    path = str(Path(upstream_bugs.__file__))
    code = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"
    result = form.run_python(code, env={"TORCH_OVERLAY_DISABLE": "1"})
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


class TestUpstreamBugs(TestCase):
    @parametrize("name", form.sampled(NAMES, 9))
    def test_with_the_overlay(self, name: str) -> None:
        self.assertEqual(getattr(upstream_bugs, name)(), [])

    @form.slow
    @form.overlay_only
    def test_on_stock_backwards_run_on_the_streams_of_the_first_frame(self) -> None:
        (first, second) = found_on_stock()["stale_streams"]  # of three
        self.assertRegex(first, r"the backward on stream \d+ ran on \d+")
        self.assertEqual(first.split()[-1], second.split()[-1])

    @form.slow
    @form.overlay_only
    def test_on_stock_a_saved_buffer_with_two_names_is_written_over(self) -> None:
        self.assertRegex(
            "; ".join(found_on_stock()["donated_duplicates"]), r"\w+ is written over, and \w+ is the same memory"
        )

    @form.slow
    @form.overlay_only
    def test_on_stock_an_input_is_saved_and_written_to(self) -> None:
        found = found_on_stock()["inputs_saved_and_written"]
        self.assertEqual(found, ["whole: 6 instead of 2"])

    @form.slow
    @form.overlay_only
    def test_on_stock_a_value_is_read_behind_the_write(self) -> None:
        found = found_on_stock()["read_behind_the_write"]
        self.assertEqual([text.split(":")[0] for text in found], ["whole", "view", "twice", "twice"])

    @form.slow
    @form.overlay_only
    def test_on_stock_partitions_concatenate_into_memories_of_their_own(self) -> None:
        found = found_on_stock()["concatenated_in_partitions"]
        self.assertEqual([text.split(":")[0] for text in found], ["matmuls", "nested", "read"])

    @form.slow
    @form.overlay_only
    def test_on_stock_a_partition_has_no_device(self) -> None:
        self.assertEqual(found_on_stock()["device_of_a_partition"], ["partition_0"])

    @form.slow
    @form.overlay_only
    def test_on_stock_a_stream_is_recorded_for_a_copy(self) -> None:
        found = found_on_stock()["recorded_lazy_views"]
        self.assertEqual(
            [text.split(":")[0] for text in found], [*["conjugate"] * 2, *["negative"] * 2, *["zeros"] * 2]
        )

    @form.slow
    @form.overlay_only
    def test_on_stock_a_pinned_buffer_is_made_on_the_device(self) -> None:
        self.assertIn("Only CPU tensors can be pinned", "; ".join(found_on_stock()["pinned_buffers"]))

    @form.slow
    @form.overlay_only
    def test_on_stock_views_lie_in_concatenations(self) -> None:
        found = found_on_stock()["views_of_what_is_concatenated"]
        self.assertEqual([text.split(":")[0] for text in found], ["viewed", "filled"])

    @form.slow
    @form.overlay_only
    def test_on_stock_constants_of_the_host_are_on_the_gpu(self) -> None:
        found = found_on_stock()["constants_on_the_host"]
        self.assertEqual([text.split(":")[0] for text in found], ["constants", "constants", "number", "download"])

    @form.slow
    @form.overlay_only
    def test_on_stock_results_are_inputs(self) -> None:
        found = found_on_stock()["results_that_are_inputs"]
        self.assertEqual(
            [text.split(":")[0] for text in found],
            ["sums", "views", "results", "updates", "puts", "lists", "product", "constants"],
        )

    @form.slow
    @form.overlay_only
    def test_on_stock_a_result_and_its_views_are_an_input(self) -> None:
        found = found_on_stock()["views_of_what_takes_no_computing"]
        self.assertEqual(
            [text.split(":")[0] for text in found], ["sums", "products", "updates", "updates", "puts"], found
        )

    @form.slow
    @form.overlay_only
    def test_on_stock_what_is_kept_changes(self) -> None:
        found = found_on_stock()["updates_of_what_is_kept"]
        self.assertEqual(
            [text.split(":")[0] for text in found], ["copied", "checked", "put", "computed", "saved", "listed"]
        )

    @form.slow
    @form.overlay_only
    def test_on_stock_gradients_are_not_joined(self) -> None:
        self.assertEqual(found_on_stock()["unjoined_gradients"], ["the current stream waits for nothing after it"])

    @form.slow
    @form.overlay_only
    def test_on_stock_the_current_stream_has_many_numbers(self) -> None:
        self.assertGreater(len(found_on_stock()["streams_by_other_numbers"]), 1)

    @form.slow
    @form.overlay_only
    def test_on_stock_an_offloaded_storage_is_gone_before_its_reader(self) -> None:
        (found, *_) = found_on_stock()["offloaded_storage"]
        self.assertRegex(found, r"the storage of \w+ is gone, and then: ")

    @form.slow
    @form.overlay_only
    def test_on_stock_a_saved_number_has_no_value(self) -> None:
        (error,) = found_on_stock()["saved_numbers"]
        self.assertRegex(error, "_local_scalar_dense.*found type 'int'")

    @form.slow
    @form.overlay_only
    def test_on_stock_random_numbers_are_drawn_again(self) -> None:
        found = found_on_stock()["numbers_drawn_again"]
        kinds = ["dropout", "bernoulli", "permutation", "rrelu", "attention", "branch"]
        self.assertEqual(list(dict.fromkeys(text.split(":")[0] for text in found)), kinds)


instantiate_parametrized_tests(TestUpstreamBugs)
