"""What CONTRIBUTING says of the test files."""

from __future__ import annotations

import re
import sys
import unittest
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import form


class TestLayout(unittest.TestCase):
    def test_every_test_file_runs_by_itself(self) -> None:
        """It puts test/ on the path before it imports from there, and runs its tests."""
        for path in sorted((form.ROOT / "test").glob("*/test_*.py")):
            text = path.read_text()
            with self.subTest(str(path.relative_to(form.ROOT))):
                before, found, _ = text.partition("import form")
                self.assertTrue(not found or "sys.path.insert" in before or "except ImportError" in text)
                self.assertTrue(re.search(r'^if __name__ == "__main__":\n    \w', text, re.MULTILINE))


if __name__ == "__main__":
    unittest.main()
