"""What `tools/operators.py` makes of failures: those that PyTorch without the overlay has as well don't count."""

from typing import Any

from torch.testing._internal.common_utils import TestCase

import operators as tool
import worker_pool
from operator_programs import Case, DEFAULT, GRAPHS


class Answers:
    """In the place of a worker."""

    def __init__(self, status: str, reason: str = "") -> None:
        self.status, self.reason, self.asked = status, reason, []

    def run(self, case: Case) -> worker_pool.Result:
        self.asked.append(case)
        return worker_pool.Result(case, self.status, self.reason)


def pair(mine: Answers, stock: Answers) -> Any:
    made: Any = object.__new__(tool.Pair)
    made.mine, made.stock, made.simulated, made.verdicts = mine, stock, False, {}
    return made


class TestVerdicts(TestCase):
    CASES = [Case("add", "forward", "float32", mode) for mode in (GRAPHS, DEFAULT)]

    def test_what_stock_fails_at_is_skipped_and_asked_once(self) -> None:
        stock = Answers("ERROR", "stock: no kernel")
        both = pair(Answers("FAILED", "wrong"), stock)
        results = [both.run(case) for case in self.CASES]
        self.assertEqual([r.status for r in results], ["skipped"] * 2)
        self.assertEqual(results[0].reason, "without the overlay, stock: no kernel")
        self.assertEqual(stock.asked, [self.CASES[1]])

    def test_what_stock_can_do_is_a_failure(self) -> None:
        result = pair(Answers("FAILED", "wrong"), Answers("ok")).run(self.CASES[0])
        self.assertEqual((result.status, result.reason), ("FAILED", "wrong"))
        self.assertEqual(tool.summary([result]), ["FAILED add forward/float32/reduce-overhead/0: wrong"])

    def test_what_is_right_is_not_tried_again(self) -> None:
        stock = Answers("ok")
        self.assertEqual(pair(Answers("ok"), stock).run(self.CASES[0]).status, "ok")
        self.assertEqual(stock.asked, [])

    def test_what_time_was_too_short_for_is_counted_by_variant(self) -> None:
        late = [worker_pool.Result(case, "skipped", "out of time") for case in self.CASES]
        self.assertIn("out of time: 2 forward", tool.summary(late))
