"""The bench of whole models: its rows, and what its table says. How many processes the bench of shapes starts."""

import contextlib
import io
import unittest
import unittest.mock
from typing import Any

import model_rows
import models
import shapes


def side(us: float, seen: str = "a", noise: float = 0.1, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a process said when it was warm, and in its two turns."""
    turns = [{"gpu us": us * (1 - noise / 2), "host us": us, "queued us": us}]
    turns.append({"gpu us": us * (1 + noise / 2), "host us": us, "queued us": us})
    return {"seen": seen, "some": [1.0, 2.0], **more}, turns


def result(**sides: Any) -> dict[str, Any]:
    return models._result("row", {s: warm for s, (warm, _) in sides.items()}, {s: t for s, (_, t) in sides.items()})


class TestResults(unittest.TestCase):
    def test_ratio_is_to_the_better_side(self) -> None:
        found = result(off=side(200), trees=side(100), relaunch=side(80, covered=0.995))
        self.assertAlmostEqual(found["ratio"], 0.8)
        self.assertEqual((found["equal"], found["errors"]), ("bits", []))
        text = models.table([found])
        self.assertIn("200 100 80", text)
        self.assertIn("99.5%", text)
        self.assertIn("1 rows, geometric mean of the ratios 0.800 (limit 0.85)\nabove 1 and the noise: none", text)

    def test_what_is_slower_than_the_noise_is_named(self) -> None:
        slow = result(off=side(200, noise=0), trees=side(100, noise=0), relaunch=side(103, noise=0))
        within = {**result(off=side(200), trees=side(100), relaunch=side(103)), "row": "within"}
        self.assertIn("above 1 and the noise: row", models.table([slow, within]))
        self.assertNotIn("within", models.table([slow, within]).splitlines()[-1])

    def test_results_that_differ(self) -> None:
        other = side(80, seen="b")
        other[0]["some"] = [1.0, 2.5]
        self.assertEqual(result(off=side(200), trees=side(100), relaunch=other)["equal"], "0.5")

    def test_compared_only(self) -> None:
        found = result(off=(side(1)[0], []), trees=(side(1)[0], []), relaunch=(side(1)[0], []))
        self.assertEqual(found["equal"], "bits")
        self.assertNotIn("ratio", found)
        self.assertIn("- - -", models.table([found]))

    def test_a_side_that_failed(self) -> None:
        found = result(off=side(200), trees=({"error": "no memory"}, []), relaunch=side(80))
        self.assertEqual((found["errors"], round(found["ratio"], 3)), (["trees: no memory"], 0.4))


class FakeProcess:
    living: list[str] = []
    most = 0

    def __init__(self, row: str, *args: Any) -> None:
        self.row = row
        self.living.append(row)
        FakeProcess.most = max(self.most, len(self.living))

    def tell(self, what: str) -> None:
        self.told = what

    def answer(self, timeout: float) -> dict[str, Any]:
        return {"error": "no memory"} if self.row == "b" else {f"{self.told} s": 1.0}

    def stop(self) -> None:
        self.living.remove(self.row)


class TestShapes(unittest.TestCase):
    def test_rows_compile_together_as_long_as_there_are_jobs(self) -> None:
        with unittest.mock.patch.object(models, "Process", FakeProcess), contextlib.redirect_stderr(io.StringIO()):
            found = shapes.measure(["a", "b", "c"], ["off", "relaunch"], jobs=9, limit=60.0)
        self.assertEqual((FakeProcess.most, FakeProcess.living), (8, []))
        sides = ["off", "relaunch", "off", "relaunch"]
        self.assertEqual([(r["row"], r["side"]) for r in found], [(row, side) for row in "abc" for side in sides])
        self.assertEqual({r["row"]: sorted(r.keys() - {"row", "side"}) for r in found}["c"], ["measure s", "warm s"])
        self.assertEqual({r["row"] for r in found if "error" in r}, {"b"})


class TestRows(unittest.TestCase):
    def test_there_are_those_that_were_asked_for(self) -> None:
        kinds = (model_rows.LANGUAGE, model_rows.PAIRS, model_rows.IMAGES, model_rows.SPEECH)
        self.assertEqual(sum(map(len, kinds)), 20)
        self.assertEqual((len(model_rows.TIMM), len(model_rows.DIFFUSERS), len(model_rows.TRAINED)), (8, 3, 8))
        self.assertEqual(len(model_rows.ROWS), 20 + 8 + 3 + 8 + 1)

    def test_configurations_are_those_of_transformers(self) -> None:
        import transformers

        for kind in (model_rows.LANGUAGE, model_rows.PAIRS, model_rows.IMAGES, model_rows.SPEECH):
            for model, config, changes in kind.values():
                made = getattr(transformers, config)(**changes)
                for name in changes.keys() - {"use_cache"}:  # encoders don't have it
                    self.assertEqual(getattr(made, name), changes[name])
                self.assertTrue(hasattr(transformers, model))
