"""Is what an extra of setup.cfg pins there in this Python?

    python tools/requirements.py EXTRA ...          prints what is missing, one pinned requirement a line
    python tools/requirements.py --torch            exit status 0 if torch is the pinned release, in its CUDA build

Reads the metadata of installed packages and imports none of them. `tools/setup` runs it in every Python it considers,
so it keeps to the standard library.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import sys
from pathlib import Path


def pins(extras: list[str]) -> list[str]:
    config = configparser.ConfigParser()
    config.read(Path(__file__).resolve().parent.parent / "setup.cfg")
    lists = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in extras)]
    return list(dict.fromkeys(line.strip() for text in lists for line in text.splitlines() if line.strip()))


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
