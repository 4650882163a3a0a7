"""What is compiled of many programs, as text, so that a change of the code can be shown to change nothing else.

    python tools/generated_text.py --out before
    ...                                                          the change
    python tools/generated_text.py --out after
    python tools/generated_text.py --compare before after        a diff of each program whose text differs

Programs are those of `test/stream_programs`, in each of their modes, and --drawn random ones (seed --seed), in the
default mode and under reduce-overhead. The text of a program is all code that Inductor generates for it on a simulated
GPU, and all plans of its streams. What differs from run to run is left out: running numbers of graphs, temporary
folders, and where the modules of ours that generated code imports stand.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import fnmatch
import functools
import hashlib
import multiprocessing
import re
import sys
import warnings
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_CHANGES = [
    (re.compile(r"(?m)^# AOT ID: \['\d+_"), "# AOT ID: ['"),
    (re.compile(r"\baot\d+_"), "aot_"),  # of backwards in compiled autograd's graph
    (re.compile(r"(?m)^(# kernel path: )\S*/"), r"\1"),
    (re.compile(r"(?m)^(# Original path: ).*"), r"\1"),
    (re.compile(r"(?m)^from torch\S*[._]_?(?:overlay|streams|offload)\S* import "), "from ours import "),
    (re.compile(r"(?m)^from torch\._inductor import profiler_ranges$"), "from ours import profiler_ranges"),
]


def normalised(text: str) -> str:
    for pattern, replacement in _CHANGES:
        text = pattern.sub(replacement, text)
    return text


def describe_plan(plan: Any) -> str:
    events = [(e.index, e.after, e.stream, sorted(e.waits)) for e in plan.events]
    waits = [tuple(map(str, dataclasses.astuple(wait))) for wait in plan.boundary_waits]
    rows = [("events", events), ("waits for the caller", sorted(waits)), ("freed after", sorted(plan.release.items()))]
    return "\n".join(["plan", *(f"    {name}: {value}" for name, value in rows)])


def compiled(run: Callable[[], Any]) -> str:
    """The code that `run` has Inductor generate, and the plans that it makes; or the error with which it ends."""
    from torch._inductor.graph import GraphLowering

    from torch_overlay._inductor.streams import planned_region  # pyrefly: ignore[missing-module-attribute]

    texts: list[str] = []
    unsubscribe = planned_region.subscribe_to_plans(lambda plan: texts.append(describe_plan(plan)))
    try:
        with mock.patch.object(GraphLowering, "save_output_code", texts.append):
            run()
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")
    finally:
        unsubscribe()
    return "\n\n".join(map(normalised, texts))


def programs(drawn: int, seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name, and what compiles it. A program is checked, too, but what the check finds is for the tests to say."""
    from analysis import corpus
    from stream_programs import PROGRAMS
    from stream_programs.drawn import trial
    from stream_programs.drawn.steps import random_spec
    from stream_programs.drawn.writer import write

    for program in PROGRAMS:
        for mode in program.modes:
            yield f"{program.name}.{mode or 'default'}", functools.partial(corpus.check_program, program, mode)
    for number in range(drawn):
        written = write(random_spec(seed, number))
        for mode in ("default", "reduce-overhead"):
            yield f"drawn_{seed}_{number}.{mode}", functools.partial(trial.judge, written, [mode], on_gpu=False)


def write_texts(chosen: Sequence[tuple[Path, Callable[[], Any]]]) -> None:
    for path, run in chosen:
        if not path.exists():
            path.write_text(compiled(run))


def compare(before: Path, after: Path) -> int:
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
    different = 0
    for name in names:
        sides = [(folder / name).read_text() if (folder / name).exists() else "" for folder in (before, after)]
        if sides[0] != sides[1]:
            different += 1
            old, new = (side.splitlines() for side in sides)
            print("\n".join(difflib.unified_diff(old, new, f"{before}/{name}", f"{after}/{name}", lineterm="", n=1)))
    print(f"{len(names)} programs, {different} differ; sha256 of all: {_sum(after)}")
    return 1 if different or not names else 0


def _sum(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.txt")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the texts; run again, it goes on where it was stopped")
    parser.add_argument("--programs", nargs="+", default=["*"], metavar="PATTERN", help="of NAME.MODE")
    parser.add_argument("--drawn", type=int, default=1000, help="random programs")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    if options.out is None:
        parser.error("--out or --compare is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    import form  # noqa: F401  # pyrefly: ignore[missing-import]

    warnings.filterwarnings("ignore")
    chosen = [
        (options.out / f"{name}.txt", run)
        for name, run in programs(options.drawn, options.seed)
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.programs)
    ]
    context = multiprocessing.get_context("fork")  # of a process that has imported all programs
    jobs = [context.Process(target=write_texts, args=(chosen[n :: options.jobs],)) for n in range(options.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    print(f"{len(list(options.out.glob('*.txt')))} programs; sha256 of all: {_sum(options.out)}")
    return int(any(job.exitcode for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
