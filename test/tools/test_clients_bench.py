"""The bench of programs around libraries: its registry, its rule of equal values, and what its table says of failures.

None of the libraries is needed: rows import them in processes of their own.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
import unittest
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import client_rows
import clients
import gate
import records
import torch
from torch._dynamo.utils import counters

import form


FILES = tempfile.TemporaryDirectory()


def answer(*values: float, digest: str = "a", **more: Any) -> dict[str, Any]:
    file = Path(FILES.name, repr(values))
    torch.save([torch.tensor(values, dtype=torch.float64)], file)
    finite = all(map(math.isfinite, values))
    return {"digest": digest, "finite": finite, "file": str(file), "warm s": 2.0, "captures": 3, **more}


def compared(mine: dict[str, Any], plain: dict[str, Any], again: Sequence[dict[str, Any]] = ()) -> tuple[str, bool]:
    return clients.equality(mine, plain, *clients.noise_of(again, plain))


def turns(*ms: float) -> dict[str, Any]:
    return {"turns": [{"ms": m, "reserved MiB": 10.0, "device MiB": 20.0} for m in ms]}


class TestRegistry(unittest.TestCase):
    def test_second_row_of_a_name_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "a second row 'nanogpt'"):
            client_rows.client("nanogpt")(client_rows.nanogpt)

    def test_names_can_be_listed_with_commas(self) -> None:
        self.assertEqual([name for name in client_rows.ROWS if "," in name], [])
        self.assertEqual(client_rows.ROWS.keys(), client_rows.LIBRARIES.keys())

    def test_unknown_row_is_refused(self) -> None:
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as told:
            clients.main(["--rows", "nanogpt,nonsense"])
        self.assertIn("no nonsense: choose from trainer, ", told.getvalue())

    def test_rows_of_a_group_are_warm_before_the_first_is_measured(self) -> None:
        log: list[tuple[str, ...]] = []

        class Process:
            def __init__(self, row: str, side: str) -> None:
                self.name = row, side

            def tell(self, word: str) -> None:
                log.append((*self.name, word))
                self.word = word

            def answer(self, timeout: float) -> dict[str, Any]:
                return {
                    "ready": {},
                    "warm": {"digest": "a", "finite": True, "warm s": 1.0, "device MiB": 5.0},
                    "measure": {"ms": {"off": 2.0, "relaunch": 1.0}[self.name[1]], "device MiB": 7.0},
                }[self.word]

            def stop(self) -> None:
                log.append((*self.name, "stop"))

        rows, sides = ("ppo", "server", "nanogpt"), ("off", "relaunch")
        command = ["--rows", ",".join(rows), "--sides", ",".join(sides), "--together", "2"]
        with (
            unittest.mock.patch.object(clients.Runs, "start", lambda runs, row, side: Process(row, side)),
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()) as told,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            self.assertEqual(clients.main([*command, "--out", folder]), 0)
            lines = [json.loads(line) for line in Path(folder, "clients.jsonl").read_text().splitlines()]
        self.assertIn("0.500", told.getvalue())
        self.assertEqual([line["row"] for line in lines], [*rows])
        self.assertNotIn("device MiB", json.dumps(lines))  # others have memory of the device
        both_orders = ["off", "relaunch", "relaunch", "off"]
        for group in (rows[:2], rows[2:]):
            mine = [entry for entry in log if entry[0] in group]
            words = [entry[2] for entry in mine]
            self.assertEqual(words.count("warm"), 2 * len(group))
            self.assertLess(max(i for i, word in enumerate(words) if word == "warm"), words.index("measure"))
            measured = [entry[:2] for entry in mine if entry[2] == "measure"]
            self.assertEqual(measured, [(row, side) for row in group for side in both_orders])
            self.assertEqual(words[-2 * len(group) :], ["stop"] * 2 * len(group))

    def test_own_loops_train(self) -> None:
        """Rows without a library, in eager: their states change, and two builds from one seed agree."""
        for name in ("ppo", "gru policy", "nanogpt", "server"):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                found = []
                for _ in range(2):
                    torch.manual_seed(0)
                    use = client_rows.Use("cpu", False, Path(folder))
                    with unittest.mock.patch.object(torch, "compile", lambda fn, **_: fn):
                        client = client_rows.ROWS[name](use)
                        before = clients.seen(client.state(), Path(folder, "before"))
                        kept = [tensor.detach().clone() for tensor in client.step()]
                    found.append(clients.seen([*kept, *client.state()], Path(folder, "after")))
                    if client.state():
                        self.assertNotEqual(
                            before["digest"], clients.seen(client.state(), Path(folder, "before"))["digest"]
                        )
                self.assertTrue(found[0]["finite"])
                self.assertEqual(found[0], found[1])

    def test_program_that_compiles_nothing_is_an_error(self) -> None:
        served = object.__new__(clients._Served)
        served.row, served.device, served.graphs, served.folder = "idle", "cpu", False, ""
        idle = {"idle": lambda use: client_rows.Client(lambda: [torch.zeros(1)])}
        with (
            unittest.mock.patch.object(client_rows, "ROWS", idle),
            unittest.mock.patch.dict(counters["stats"], clear=True),
            self.assertRaisesRegex(RuntimeError, "nothing was compiled"),
        ):
            served.warm()

    def test_loop_is_measured_without_what_its_library_does_around_it(self) -> None:
        served = object.__new__(clients._Served)
        served.device, served.steps, served.used = "cpu", 12, 0.0
        steps: list[int] = []
        rows = (lambda: 0.5), None
        for loop, ms in zip(rows, (125.0, 1.0)):
            served.client = client_rows.Client(lambda: steps.append(1) or (), steps=4, loop=loop)
            found = served.measure()["ms"]
            if loop:
                self.assertAlmostEqual(found, ms)
            else:
                self.assertLess(found, ms)
        self.assertEqual(len(steps), 2 * 3)


class TestEquality(unittest.TestCase):
    def test_bits(self) -> None:
        self.assertEqual(compared(answer(1.0), answer(1.0)), ("bits", True))

    def test_difference_without_noise_counts(self) -> None:
        cell, equal = compared(answer(1.0, 4.001, digest="b"), answer(1.0, 4.0), [answer(1.0, 4.0)])
        self.assertFalse(equal)
        self.assertEqual(cell, "DIFFER by 0.0003 (first 0.0003 in 1 of 1; off 0 in 0 of 1)")

    def test_difference_like_that_of_two_runs_without_graphs(self) -> None:
        again = [answer(1.0, 4.0), answer(1.0, 4.001, digest="c")]
        cell, equal = compared(answer(1.0, 3.998, digest="b"), answer(1.0, 4.0), again)
        self.assertEqual((cell, equal), ("noise (0.0005; off 0.0003 in 1 of 2)", True))
        self.assertFalse(compared(answer(1.0, 3.9, digest="b"), answer(1.0, 4.0), again)[1])

    def test_bits_that_no_sample_shows(self) -> None:
        self.assertFalse(compared(answer(1.0, digest="b"), answer(1.0), [answer(1.0)])[1])

    def test_nan(self) -> None:
        cell, equal = compared(answer(math.nan), answer(math.nan))
        self.assertEqual((cell, equal), ("not finite without graphs", False))
        self.assertFalse(compared(answer(math.nan, digest="b"), answer(1.0), [answer(1.1, digest="c")])[1])

    def test_other_sizes(self) -> None:
        self.assertEqual(clients.differences(answer(1.0), answer(1.0, 2.0)), [math.inf])

    def test_one_value_of_many(self) -> None:
        plain, other = torch.zeros(1000), torch.zeros(1000)
        other[501] = 0.5
        found = [clients.seen([v], Path(FILES.name, str(i))) for i, v in enumerate((plain, other))]
        self.assertEqual(compared(*reversed(found))[0], "DIFFER by 0.5 (first 0.5 in 1 of 1; off 0 in 0 of 0)")


class TestTable(unittest.TestCase):
    def rows(self) -> dict[str, dict[str, dict[str, Any]]]:
        error = "Unsupported: a | b\nmore"
        first = {"off": answer(1.0) | turns(4.0, 6.0), "trees": {"error": error}}
        first["relaunch"] = answer(1.0, **{"in graphs": 0.995}) | turns(2.0, 3.0)
        return {"row": clients.merged([first, first])}

    def test_cells(self) -> None:
        off, trees, relaunch = clients.cells("row", self.rows()["row"])
        self.assertEqual(off, ["row", "off", "bits", "5.000", "-", "10", "20", "2.0, 2.0", "3", "-", ""])
        self.assertEqual(trees, ["", "trees", *"-------", "-", "Unsupported: a | b"])
        self.assertEqual(relaunch[3:5] + relaunch[9:], ["2.500", "0.500", "99.5%", ""])

    def test_markdown_has_a_cell_for_each_header(self) -> None:
        lines = clients.markdown(self.rows()).splitlines()
        self.assertEqual(len(lines), 2 + 3)
        self.assertEqual({line.replace("\\|", "").count("|") for line in lines}, {len(clients.HEADER) + 1})

    def test_failures_of_trees_are_theirs(self) -> None:
        row = self.rows()["row"]
        self.assertFalse(clients.failed(row))
        self.assertTrue(clients.failed(row | {"relaunch": {"error": "no memory"}}))
        wrong = clients.merged([{"off": answer(1.0), "relaunch": answer(2.0, digest="b")}])
        self.assertTrue(clients.failed(wrong))

    def test_gate_reads_the_figures(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "new.jsonl"
            rows = {name: clients.figures(sides) for name, sides in self.rows().items()}
            records.write(path, {"hardware": "NVIDIA H100, 1", "commit": "1"}, {"clients": rows})
            (record,) = gate.load([path])[1]
        self.assertEqual(record.figures["wall time"], {"ms / off": [0.5, 0.5, 0.5, 0.5]})
        self.assertEqual(record.figures["count"], {"captures": [3]})


@form.overlay_only
class TestProcesses(unittest.TestCase):
    def test_library_that_is_missing_costs_its_own_row(self) -> None:
        """Two real processes: one of a row without a library, and one of a row whose library isn't there."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as told:
            broken = Path(folder) / "modules" / "timm.py"
            broken.parent.mkdir()
            broken.write_text("raise ImportError('no timm here\\nand more')\n")
            path = f"{broken.parent}"
            about = {"hardware": "", "torch, cuda, triton": "", "commit": ""}
            with (
                unittest.mock.patch.dict("os.environ", PYTHONPATH=path, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0"),
                unittest.mock.patch.object(clients.streams, "describe", lambda: dict(about)),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                arguments = ["--device", "cpu", "--sides", "off", "--rows", "server,timm inference"]
                status = clients.main([*arguments, "--out", f"{folder}/out"])
            lines = (Path(folder) / "out" / "clients.jsonl").read_text().splitlines()
        good, bad = map(json.loads, lines)
        self.assertEqual(status, 1)
        self.assertEqual(good["sides"]["off"]["values"], "bits")
        self.assertEqual(bad["sides"]["off"]["error"], "ImportError: no timm here\nand more")
        self.assertRegex(told.getvalue(), r"timm inference +off +- .* ImportError: no timm here\n")

    def test_process_that_is_too_late_costs_its_own_row(self) -> None:
        """Nothing answers "ready" in a hundredth of a second."""
        args = argparse.Namespace(
            limit=60.0, timeout=0.01, out=None, jobs=1, together=1, device="cpu", steps=1, autotune=False
        )
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(clients.Runs(args).once("server", "off"), {"error": "no answer in time"})
