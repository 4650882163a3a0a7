"""Silent bugs of stock PyTorch in backwards with streams are gone, and the tests that say so fail on stock.

The numbers are those of the project's list of upstream's silent bugs. Others of the list have their tests where they
belong: S2 (memory reused across streams) in `test_user_streams.py`, S6 (cache keys) in `test_cache_key.py`, S7
(objects kept alive) in `test_streams.py`.
"""

import functools
import json
from pathlib import Path

import upstream_bugs
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form


NAMES = [check.__name__ for check in upstream_bugs.CHECKS]
# The parts of each check that fail on stock, in order, as a text.
PARTS = {
    "inputs_saved_and_written": "whole",
    "read_behind_the_write": "whole view twice twice",
    "written_through_other_types": "part whole kernel",
    "concatenated_in_partitions": "matmuls nested read",
    "device_of_a_partition": "partition_0",
    "recorded_lazy_views": "conjugate conjugate negative negative zeros zeros",
    "views_of_what_is_concatenated": "viewed filled",
    "constants_on_the_host": "constants constants number download",
    "results_that_are_inputs": "sums views results updates puts lists product constants",
    "views_of_what_takes_no_computing": "sums products updates updates puts",
    "updates_of_what_is_kept": "copied checked put computed saved listed",
}
TEXTS = {
    "stale_streams": r"the backward on stream \d+ ran on \d+",
    "donated_duplicates": r"\w+ is written over, and \w+ is the same memory",
    "inputs_saved_and_written": "^whole: 6 instead of 2$",
    "kernels_of_one_name": "^b'other' in place of b'one'$",
    "pinned_buffers": "Only CPU tensors can be pinned",
    "unjoined_gradients": "^the current stream waits for nothing after it$",
    "offloaded_storage": r"the storage of \w+ is gone, and then: ",
    "saved_numbers": "_local_scalar_dense.*found type 'int'",
}


@functools.cache
def found_on_stock() -> dict[str, list[str]]:
    """What the checks find without the overlay, in a process of its own."""
    path = str(Path(upstream_bugs.__file__))
    code = f"import runpy; runpy.run_path({path!r}, run_name='__main__')"
    result = form.fork_python(code, env={"TORCH_OVERLAY_DISABLE": "1"})
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


@instantiate_parametrized_tests
class TestUpstreamBugs(TestCase):
    @parametrize("name", form.sampled(NAMES, 9))
    def test_with_the_overlay(self, name: str) -> None:
        self.assertEqual(getattr(upstream_bugs, name)(), [])

    @form.slow
    @form.overlay_only
    @parametrize("name", NAMES)
    def test_on_stock(self, name: str) -> None:
        found = found_on_stock()[name]
        self.assertTrue(found)
        if name in PARTS:
            self.assertEqual([text.split(":")[0] for text in found], PARTS[name].split())
        self.assertRegex("; ".join(found), TEXTS.get(name, "."))

    @form.slow
    @form.overlay_only
    def test_on_stock_backwards_run_on_the_streams_of_the_first_frame(self) -> None:
        (first, second) = found_on_stock()["stale_streams"]  # of three
        self.assertEqual(first.split()[-1], second.split()[-1])

    @form.slow
    @form.overlay_only
    def test_on_stock_the_current_stream_has_many_numbers(self) -> None:
        self.assertGreater(len(found_on_stock()["streams_by_other_numbers"]), 1)

    @form.slow
    @form.overlay_only
    def test_on_stock_random_numbers_are_drawn_again(self) -> None:
        found = found_on_stock()["numbers_drawn_again"]
        kinds = ["dropout", "bernoulli", "permutation", "rrelu", "attention", "branch"]
        self.assertEqual(list(dict.fromkeys(text.split(":")[0] for text in found)), kinds)
