"""The README is a page, links of all documents lead somewhere, and the chart is made of what was measured."""

import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from xml.etree import ElementTree

import form


DOCUMENTS = sorted([*form.ROOT.glob("*.md"), *form.ROOT.glob("docs/*.md"), *form.ROOT.glob("examples/*.md")])
PLOT = form.ROOT / "tools" / "bench" / "plot.py"


def anchors(text: str) -> set[str]:
    """Of the headings, as they are made for Markdown."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


class TestDocuments(unittest.TestCase):
    def test_readme_is_a_page(self) -> None:
        lines = (form.ROOT / "README.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 130)
        self.assertTrue(any("pip install" in line for line in lines[:40]))

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
        notes = set(re.findall(r"Note \[[^\]]+\]", text.replace("\n", " ")))
        sources = "".join(
            path.read_text() for end in ("py", "c") for path in (form.ROOT / "torch_overlay").rglob(f"*.{end}")
        )
        self.assertEqual({note for note in notes if note not in " ".join(sources.split())}, set())


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
