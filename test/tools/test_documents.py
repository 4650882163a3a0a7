"""Tests the pages: length, links, names, prose, commands, figures, programs, and the chart of the README."""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pages import blocks, DOCUMENTS, PAGES, paragraphs, tables, without_code

import form


PLOT = form.ROOT / "tools" / "bench" / "plot.py"
# Where a sentence begins: a paragraph, an item of a list, a cell, or the end of the sentence before, and marks of bold.
BEGIN = r"(?:^|[.!?:;|] |^[-*] |^\d+\. |^#+ )(?:\*\*|_)?"
PHRASES = {
    "a clause as the subject": re.compile(rf"{BEGIN}(?:What|Who|Whoever|That which)\b(?![^.|]*\?)", re.M),
    "a clause as a cell": re.compile(r"\| (?:what|who) "),
    "a pronoun as the subject": re.compile(rf"{BEGIN}(?:Those|Others|The ones)\b", re.M),
    "reported, not told": re.compile(r"\b(?:is|are) told\b"),
    "no heroics": re.compile(r"nobody would miss|blocks nobody|finds? \w+ at once|costs nothing", re.I),
    "different, not another": re.compile(r"\banother one\b|\bis another\b"),
}
FIGURE = re.compile(r"(?<![\w.#/-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w/]*[\w]|\.\d)")


def anchors(text: str) -> set[str]:
    """Of the headings, as they are made for Markdown."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


class TestDocuments(unittest.TestCase):
    def test_readme_is_a_page(self) -> None:
        lines = (form.ROOT / "README.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 130)
        self.assertTrue(any("pip install" in line for line in lines[:80]))

    def test_a_cell_of_the_readme_has_one_figure_that_was_measured(self) -> None:
        measured = set(re.findall(r"[\d.]+", (form.ROOT / "docs" / "measurements.md").read_text()))
        cells = [cell for table in tables((form.ROOT / "README.md").read_text()) for row in table for cell in row]
        figures = [cell for cell in cells if re.fullmatch(r"[\d., /]*\d", cell)]
        self.assertGreater(len(figures), 30)
        self.assertEqual([figure for figure in figures if figure not in measured], [])

    def test_prose(self) -> None:
        for page in PAGES:
            text = without_code(page.read_text())
            for rule, pattern in PHRASES.items():
                with self.subTest(f"{page.name}: {rule}"):
                    self.assertEqual([text[m.start() : m.start() + 60] for m in pattern.finditer(text)], [])

    def test_a_paragraph_has_three_figures_at_most(self) -> None:
        for page in PAGES:
            for paragraph in paragraphs(page.read_text()):
                with self.subTest(page.name):
                    found = FIGURE.findall(re.sub(r"\d+\. |\d+\^\d+|[Pp]ython [\d.]+", "", paragraph))
                    self.assertLessEqual(len(found), 3, f"{found}: {paragraph}")

    def test_rules_of_prose_find_what_they_forbid(self) -> None:
        for text, rule in (
            ("It runs. What is left stays.", "a clause as the subject"),
            ("- **Who waits** may read.", "a clause as the subject"),
            ("## Who gains", "a clause as the subject"),
            ("| name | what it does |", "a clause as a cell"),
            ("| Those of a backward | 3 |", "a pronoun as the subject"),
            ("The error is told.", "reported, not told"),
            ("A size costs nothing.", "no heroics"),
            ("It is another one.", "different, not another"),
        ):
            self.assertTrue(PHRASES[rule].search(text), text)
        self.assertEqual(
            FIGURE.findall("12 of 3.5 ms, 1,000 and 2e-5; not H100, 2.15.0, #12, x86 or b2cda2c"),
            ["12", "3.5", "1,000", "2e-5"],
        )

    def test_sections_of_measurements_begin_with_their_origin(self) -> None:
        text = (form.ROOT / "docs" / "measurements.md").read_text()
        sections = [part for part in re.split(r"^##+ ", text, flags=re.M)[1:] if "\n|" in part]
        self.assertGreater(len(sections), 6)
        for section in sections:
            with self.subTest(section.partition("\n")[0]):
                self.assertLessEqual({"device", "commit", "command", "spread"}, {*tables(section)[0][0]})

    def test_commands_of_pages_exist(self) -> None:
        tools = "".join(path.read_text(errors="replace") for path in form.ROOT.glob("tools/**/*") if path.is_file())
        commands = "".join(path.read_text() for path in form.ROOT.glob("torch_overlay/**/*.py"))
        seen = 0
        for page in DOCUMENTS:
            text = page.read_text()
            spans = [
                " ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
            ]
            spans += [
                line.strip()
                for line in text.splitlines()
                if line.startswith("    ") or line.startswith(("python ", "tools/"))
            ]
            for span in spans:
                if ran := re.match(
                    r"(?:python )?(tools/[\w/]+(?:\.py)?)(?= |$)(.*)|python -m torch_overlay (\w+)(.*)", span
                ):
                    with self.subTest(f"{page.name}: {span}"):
                        seen += 1
                        tool, more, command, of_command = ran.groups()
                        source = tools if tool else commands
                        self.assertTrue((form.ROOT / tool).exists() if tool else f'"{command}"' in commands)
                        for option in re.findall(r"(?<= )--[\w-]+", (more or of_command or "").partition("#")[0]):
                            self.assertTrue(option in source or option in ("--epochs",), option)
        self.assertGreater(seen, 60)

    def test_links_lead_somewhere(self) -> None:
        for document in DOCUMENTS:
            for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
                with self.subTest(f"{document.name}: {target}"):
                    if "://" in target:
                        continue
                    path, _, anchor = target.partition("#")
                    found = (document.parent / path).resolve() if path else document
                    self.assertTrue(found.exists(), found)
                    self.assertTrue(not anchor or anchor in anchors(found.read_text()), anchor)

    def test_modules_that_the_walk_names_exist(self) -> None:
        text = (form.ROOT / "docs" / "design.md").read_text()
        files = [path.as_posix() for path in (form.ROOT / "torch_overlay").rglob("*")]
        files += [path.as_posix() for path in (form.ROOT / "tools").rglob("*")]
        named = set(re.findall(r"`([\w/]+\.(?:py|c))`", text))
        self.assertGreater(len(named), 30)
        self.assertEqual({name for name in named if not any(file.endswith(f"/{name}") for file in files)}, set())
        notes = set(re.findall(r"Note \[[^\]]+\]", " ".join(text.split())))
        sources = "".join(
            path.read_text() for end in ("py", "c") for path in (form.ROOT / "torch_overlay").rglob(f"*.{end}")
        )
        self.assertEqual({note for note in notes if note not in " ".join(sources.split())}, set())


@form.overlay_only
class TestPrograms(unittest.TestCase):
    def run_block(self, page: str, block: str) -> tuple[Any, Any]:
        """Run it on a simulated GPU. Return what was compiled, and how much of it asks for graphs."""
        import torch_overlay
        from torch_overlay.testing import observe, simulated_gpu

        with simulated_gpu(), observe() as seen, contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, page, "exec"), {"__name__": "page"})
            return seen, torch_overlay.coverage()

    def test_code_of_pages_is_python(self) -> None:
        for page in DOCUMENTS:
            for block in blocks(str(page), "python"):
                with self.subTest(page.name):
                    compile(block, page.name, "exec")

    def test_first_program_runs_on_two_streams_in_a_graph(self) -> None:
        (block,) = blocks("README.md", "python")
        seen, coverage = self.run_block("README.md", block)
        self.assertEqual(([r.kind for r in seen.regions], seen.graph_breaks), (["inference"], []))
        self.assertEqual(len({operation.stream for operation in seen.plans[0].ops}), 2)
        self.assertEqual([function.calls for function in coverage.functions], [3])
        self.assertEqual(coverage.share, 1.0)

    def test_programs_that_replace_graphs_by_hand_run_in_graphs(self) -> None:
        page = "docs/from_cuda_graphs.md"
        made = [block for block in blocks(page, "python") if block.startswith("# with the overlay")]
        kinds = []
        for block in made:
            seen, coverage = self.run_block(page, block)
            kinds.append([region.kind for region in seen.regions])
            self.assertEqual((coverage.share, coverage.outside), (1.0, []))
            self.assertTrue(all(function.regions for function in coverage.functions))
        self.assertEqual(kinds, [["inference"], ["inference"], ["forward", "backward", "inference"]])


class TestHelp(unittest.TestCase):
    @form.overlay_only
    def test_prose(self) -> None:
        from torch_overlay._cli.commands import COMMANDS, main

        for command in ("", *COMMANDS):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([*filter(None, [command]), "--help"])
            text = printed.getvalue()
            self.assertIn("torch_overlay", text)
            for rule, pattern in PHRASES.items():
                with self.subTest(f"{command}: {rule}"):
                    self.assertEqual([text[m.start() : m.start() + 60] for m in pattern.finditer(text)], [])

    @form.overlay_only
    def test_all_options_are_in_the_page_of_tools(self) -> None:
        from torch_overlay._cli.commands import COMMANDS, parser

        text = (form.ROOT / "docs" / "tools.md").read_text()
        rows = [(row[0], row[1]) for table in tables(text) for row in table if row[0].startswith("`--")]
        (commands,) = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
        self.assertEqual(list(commands.choices), list(COMMANDS))
        for command, options in commands.choices.items():
            for action in options._actions:
                if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help":
                    with self.subTest(f"{command} {action.option_strings}"):
                        named = [of for names, of in rows if all(f"`{o}" in names for o in action.option_strings)]
                        self.assertTrue([of for of in named if of == "all" or f"`{command}`" in of])


class TestPlot(unittest.TestCase):
    def plot(self, lines: list[str], *options: str) -> tuple[int, str, str]:
        with tempfile.TemporaryDirectory() as folder:
            measured, out = Path(folder, "relaunch.jsonl"), Path(folder, "out.svg")
            measured.write_text("\n".join(lines))
            command = [sys.executable, str(PLOT), str(measured), "--out", str(out), *options]
            done = subprocess.run(command, capture_output=True, text=True)
            return done.returncode, out.read_text() if out.exists() else "", done.stderr

    def row(self, name: str, **times: float) -> str:
        sides = {side: {"median": {"gpu us": value}} for side, value in times.items()}
        return json.dumps({"row": name, "what": f"the row <{name}>", "sides": sides})

    def test_bars_are_as_long_as_what_was_measured(self) -> None:
        status, text, _ = self.plot([self.row("llama", off=400, relaunch=100)], "--rows", "llama", "--note", "here")
        self.assertEqual(status, 0)
        svg = ElementTree.fromstring(text)
        bars = {bar.get("class"): float(bar.get("width", 0)) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")}
        self.assertEqual(list(bars), ["off", "relaunch"])
        self.assertAlmostEqual(bars["off"] / bars["relaunch"], 4, places=2)
        self.assertIn("the row &lt;llama&gt;", text)
        self.assertIn("100 µs", text)

    def test_row_that_was_not_measured(self) -> None:
        status, text, error = self.plot([self.row("llama", off=1)], "--rows", "llama,experts")
        self.assertEqual((status, text), (2, ""))
        self.assertIn("has no row experts; it has llama", error)

    def test_line_of_something_else(self) -> None:
        status, _, error = self.plot(["no JSON"], "--rows", "llama")
        self.assertNotEqual(status, 0)
        self.assertIn("relaunch.jsonl:1: not a line of tools/bench/relaunch.py", error)
