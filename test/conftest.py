"""Makes `import form` work in every test, whatever folder it lies in."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent))

import form  # noqa: F401
