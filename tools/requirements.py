"""Is what an extra or a dependency group of pyproject.toml pins there in this Python?

    python tools/requirements.py NAME ...           prints what is missing, one pinned requirement a line
    python tools/requirements.py --torch            exit status 0 if torch is the pinned release, in its CUDA build

The release of torch is the one of torch_overlay/base.json. Reads the metadata of installed packages and imports none of
them. `tools/setup` runs it in every Python it considers, so it keeps to the standard library.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent


def pins(names: list[str]) -> list[str]:
    torch = json.loads((ROOT / "torch_overlay" / "base.json").read_text())["torch"]
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = config["project"]["optional-dependencies"] | config["dependency-groups"]
    return list(dict.fromkeys([f"torch=={torch}", *(pin for name in names for pin in lists[name])]))


def is_there(pin: str) -> bool:
    name, _, version = pin.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if name == "torch":  # the builds without CUDA have none of the functions that the overlay is about
        release, _, build = found.partition("+")
        return release == version and not build.startswith(("cpu", "rocm", "xpu"))
    return found == version


def main(argv: list[str]) -> int:
    if argv == ["--torch"]:
        return 0 if is_there(pins([])[0]) else 1
    missing = [pin for pin in pins(argv) if not is_there(pin)]
    print("\n".join(missing))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
