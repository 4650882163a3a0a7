"""What CONTRIBUTING says of the test files."""

import ast
import re
import unittest
from collections.abc import Iterator
from pathlib import Path

import form


def imported(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if re.search(r"import.*\btest_", text) else ():
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


class TestLayout(unittest.TestCase):
    def test_no_file_imports_a_test_module(self) -> None:
        """What several need stands in a module of its own."""
        for path in sorted((form.ROOT / "test").rglob("*.py")):
            with self.subTest(str(path.relative_to(form.ROOT))):
                self.assertEqual([name for name in imported(path) if name.startswith("test_")], [])

    def test_no_test_changes_the_path(self) -> None:
        """`pythonpath` of pyproject.toml says where helpers are."""
        for path in sorted((form.ROOT / "test").rglob("test_*.py")):
            with self.subTest(str(path.relative_to(form.ROOT))):
                text = path.read_text()
                statements = ast.parse(text).body if "sys.path" in text else []
                calls = [ast.unparse(n) for n in statements if isinstance(n, ast.Expr)]
                self.assertEqual([call for call in calls if "sys.path" in call], [])
