#!/usr/bin/env python3
"""Counts what the programs of the tests' corpora do: kernels, events, waits, nodes, allocations. Needs no GPU.

    python tools/bench/counts.py --jsonl FILE [--corpora 'stream programs'] [--sample 25 [4]] [--jobs 2]
    python tools/bench/counts.py --names

`stream_counts` says what is counted of programs with streams, `relaunch_counts` of those with CUDA graphs. Nothing is
timed, and every count is the same on every machine. --sample N takes about one program in N, of each corpus or of
the first one, then of the second one: those whose names have a hash that N divides, so that a new program doesn't
change which of the others are taken. With --names the names of all programs are compared with the rows of the baseline,
too; without --jsonl nothing else is done. Exit status: 0, 1 if a program is new or gone, 2 for bad input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import multiprocessing
import platform
import sys
import zlib
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "test"), str(ROOT / "test" / "inductor")]

import gate  # noqa: E402  # pyrefly: ignore[missing-import]
import records  # noqa: E402  # pyrefly: ignore[missing-import]
import relaunch_counts  # noqa: E402  # pyrefly: ignore[missing-import]
import stream_counts  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Sequence

CORPORA = {"stream programs": stream_counts, "relaunch programs": relaunch_counts}


def describe() -> dict[str, Any]:
    """`streams.describe` of a run that needs no GPU."""
    return {**streams.describe(), "device": "cpu", "hardware": processor()}


def processor() -> str:
    """The model of the processor, as Linux names it."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(said[name] for name in wanted if name in said) or platform.machine()


def measure(program: tuple[str, str]) -> records.Figures:
    """The figures of a program of a corpus. Python's garbage collector, which frees memory when it comes by, stays out
    of it."""
    import form  # noqa: F401  # pyrefly: ignore[missing-import]

    corpus, name = program
    gc.disable()
    try:
        return CORPORA[corpus].figures(name)
    finally:
        gc.enable()


def sample(names: Sequence[str], one_in: int) -> list[str]:
    """About one name in so many. Whether a name is taken depends on nothing but itself."""
    return [name for name in names if zlib.crc32(name.encode()) % one_in == 0]


def compare_names(corpora: Sequence[str], baseline: Path) -> list[str]:
    """A line for each program that the baseline has no row for, and for each row that has no program. Raises BadInput
    for a baseline that can't be read."""
    rows = {record.key for record in records.read(baseline) if record.bench in corpora}
    programs = {(corpus, name) for corpus in corpora for name in CORPORA[corpus].names()}
    new = [f"{corpus}: {name} is not in the baseline: accept it" for corpus, name in sorted(programs - rows)]
    gone = [f"{corpus}: {name} of the baseline is gone: accept it" for corpus, name in sorted(rows - programs)]
    return [*new, *gone]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--sample", type=records.positive, nargs="+", default=[1], metavar="N", help="one program in N")
    parser.add_argument("--names", action="store_true", help="compare names with the baseline")
    parser.add_argument("--jobs", type=records.positive, default=2, help="processes")
    records.add_option(parser)
    args = parser.parse_args(argv)
    differences: list[str] = []
    if len(args.sample) not in (1, len(args.corpora)):
        parser.error("--sample takes one number, or one for each corpus")
    if args.names:
        try:
            differences = compare_names(args.corpora, gate.BASELINE / "cpu.jsonl")
        except records.BadInput as error:
            parser.error(str(error))
        print("\n".join(differences or ["the baseline has a row for each program"]))
        if args.jsonl is None:
            return int(bool(differences))
    parts = zip(args.corpora, itertools.cycle(args.sample))
    programs = [(corpus, name) for corpus, part in parts for name in sample(CORPORA[corpus].names(), part)]
    context = multiprocessing.get_context("fork")  # of a process that has imported all programs
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool:
        found = dict(zip(programs, pool.map(measure, programs, chunksize=4)))
    about = describe()
    rows = {corpus: {name: f for (c, name), f in found.items() if c == corpus} for corpus in args.corpora}
    records.write(args.jsonl, about, rows)
    for corpus, figures in rows.items():
        total: dict[str, float] = {}
        for row in figures.values():
            for name, (value,) in row["exact"].items():
                total[name] = total.get(name, 0) + value
        print(f"{len(figures)} {corpus}: {', '.join(f'{value:.0f} {name}' for name, value in total.items())}")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
