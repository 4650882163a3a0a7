#!/usr/bin/env python3
"""Compares what benchmarks measured with what was accepted: no figure changes unseen.

    python tools/bench/gate.py check NEW.jsonl [MORE.jsonl] [--some] [--all]
    python tools/bench/gate.py accept NEW.jsonl [MORE.jsonl] [--some] [--other-machine] [--dirty]

A benchmark writes such files with --jsonl FILE (`records`). The accepted ones are benchmarks/baseline/DEVICE.jsonl, a
line for each row, with hardware, versions and commit. A figure's value is the median of its samples, and its noise is
estimated from their median absolute deviations:

    regressed    larger: by more than the noise, and, noise included, by as much as matters for its kind
    improved     the same, smaller; accept it, or a later change may lose it unseen
    changed      a count of compiled code that isn't the accepted one: more or fewer, it says nothing about better
    noisy        a change that matters could hide in the noise: measure more processes or turns, and quietly
    skipped      what the figure depends on (`depends` of the line about it) differs from that of the baseline

Rows without these words are the same, and printed with --all. A row of a benchmark that was measured must be on both
sides, or, with --some, in the baseline. Exit status: 0, 1 if anything regressed, improved or changed, 2 for bad
input.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]
from records import BadInput, KINDS, Record, TIMED  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BASELINE = HERE.parents[1] / "benchmarks" / "baseline"
SURE = 4.0  # standard errors of a difference that is no noise
FEWEST = 6  # samples that say something about the noise of a time
TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation, of normal noise
OF_MEDIAN = 1.2533  # standard error of a median to that of a mean
FAILING = ("regressed", "improved", "changed")
HINT = """
Look whether each change is meant. If all are, accept them: tools/bench/gate.py accept, and say why in the commit."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One figure on both sides. `change` is relative, and so is `noise`, the change that could be chance."""

    record: Record
    name: str
    kind: str
    old: float
    new: float
    noise: float
    why: str = ""  # the reason for skipping it

    @property
    def change(self) -> float:
        if self.old == self.new:
            return 0.0
        return self.new / self.old - 1 if self.old else math.inf

    @property
    def verdict(self) -> str:
        size, limit = abs(self.change), KINDS[self.kind]
        if self.why:
            return "skipped"
        if self.kind == "exact":
            return "changed" if size else "same"
        if size > self.noise and size + self.noise >= limit:
            return "regressed" if self.change > 0 else "improved"
        return "noisy" if self.noise > limit else "same"

    def cells(self) -> list[str]:
        change = "new" if math.isinf(self.change) else f"{self.change:+.1%}"
        row = f"{self.record.bench}: {self.record.row}"
        return [self.verdict, row, self.name, self.kind, f"{self.old:.6g}", f"{self.new:.6g}", change, self.why]


def noise_of(kind: str, old: Sequence[float], new: Sequence[float]) -> float:
    """The relative difference of two medians that chance explains. The sides are taken to be as noisy as the noisier
    one; a few samples of a time say nothing about it."""
    if kind in TIMED and min(len(old), len(new)) < FEWEST:
        return math.inf

    def deviation(samples: Sequence[float]) -> float:
        median = statistics.median(samples)
        return statistics.median(abs(s - median) for s in samples) / median if median else 0.0

    sigma = TO_SIGMA * max(deviation(old), deviation(new))
    return SURE * OF_MEDIAN * sigma * math.sqrt(1 / len(old) + 1 / len(new))


def compare(old: Record, new: Record) -> Iterator[Finding]:
    """Every figure of a row. Raises BadInput where a side lacks one."""
    why = difference_of_machines(old, new)
    for kind in dict.fromkeys((*old.figures, *new.figures)):
        mine, theirs = new.figures.get(kind, {}), old.figures.get(kind, {})
        for name in dict.fromkeys((*theirs, *mine)):
            if name not in mine or name not in theirs:
                where = "is not in the baseline: accept it" if name in mine else "was not measured"
                raise BadInput(f"{new.bench}: {name} ({kind}) of row {new.row} {where}")
            a, b = theirs[name], mine[name]
            yield Finding(new, name, kind, statistics.median(a), statistics.median(b), noise_of(kind, a, b), why)


def difference_of_machines(old: Record, new: Record) -> str:
    """Say where `depends` of two records of a row differs; empty if nowhere."""
    before, after = ((r.about.get("depends") or {}) for r in (old, new))
    if before == after:
        return ""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    ours, theirs = (", ".join(str(side.get(name, f"no {name} named")) for name in names) for side in (after, before))
    return f"with {ours}; the baseline with {theirs}"


def check(baseline: Sequence[Record], new: Sequence[Record], some: bool) -> tuple[list[Finding], int]:
    """The findings, and how many rows of the baseline were not measured. Raises BadInput for a row that is missing."""
    old, measured = {r.key: r for r in baseline}, {r.key: r for r in new}
    benches = {r.bench for r in new}
    if unknown := [key for key in measured if key not in old]:
        raise BadInput(f"{unknown[0][0]}: row {unknown[0][1]} is not in the baseline (of {len(unknown)}): accept it")
    missing = [key for key in old if key[0] in benches and key not in measured]
    if missing and not some:
        raise BadInput(
            f"{missing[0][0]}: row {missing[0][1]} was not measured (of {len(missing)}): measure it, or pass --some"
        )
    return [f for key, record in measured.items() for f in compare(old[key], record)], len(missing)


def accept(baseline: Sequence[Record], new: Sequence[Record], some: bool, other_machine: bool = False) -> list[Record]:
    """The next baseline. Rows that a benchmark no longer has are dropped, unless only some were measured.

    Raises BadInput where figures depend on a machine that isn't the baseline's: they would be compared there no more.
    """
    old, benches = {r.key: r for r in baseline}, {r.bench for r in new}
    for record in () if other_machine else new:
        if record.key in old and (why := difference_of_machines(old[record.key], record)):
            raise BadInput(
                f"{record.bench}: row {record.row} was measured {why}: measure it there, or pass --other-machine to "
                "compare it here from now on"
            )
    kept = {r.key: r for r in baseline if some or r.bench not in benches}
    return [record for _, record in sorted({**kept, **{r.key: r for r in new}}.items())]


def check_commits(new: Sequence[Record]) -> None:
    """Raises BadInput for a row that was measured with changes that no commit has."""
    for record in new:
        if (commit := str(record.about.get("commit"))).endswith("-dirty"):
            raise BadInput(
                f"{record.bench}: row {record.row} was measured at {commit}, with changes no commit has: commit and "
                "measure again, or pass --dirty"
            )


def load(files: Sequence[Path]) -> tuple[Path, list[Record]]:
    """The path of the device's baseline, and what was measured."""
    new = [record for file in files for record in records.read(file)]
    if len(keys := {r.key for r in new}) < len(new):
        key = next(key for key in keys if sum(r.key == key for r in new) > 1)
        raise BadInput(f"{key[0]}: row {key[1]} is in two of the files")
    devices = sorted({r.about["device"] for r in new})
    if len(devices) > 1:
        raise BadInput(f"{', '.join(map(str, files))}: measured on {', '.join(devices)}: compare one device at a time")
    return BASELINE / f"{devices[0]}.jsonl", new


def report(findings: Sequence[Finding], unmeasured: int, everything: bool) -> str:
    shown = [f for f in findings if everything or f.verdict != "same"]
    lines = []
    if shown:
        header = ["", "row", "figure", "kind", "baseline", "now", "change", ""]
        lines = [*streams.aligned([header, *(f.cells() for f in shown)]), ""]
    counts = collections.Counter(f.verdict for f in findings)
    told = [f"{counts[word]} {word}" for word in (*FAILING, "noisy", "skipped", "same")]
    tail = f"; {unmeasured} rows of the baseline were not measured" if unmeasured else ""
    return "\n".join([*lines, f"{len(findings)} figures: {', '.join(told)}{tail}"])


def show(text: str) -> None:
    """Print, and stay quiet where nobody reads on, as with `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "accept"))
    parser.add_argument("files", type=Path, nargs="+", metavar="NEW.jsonl")
    parser.add_argument("--some", action="store_true", help="not every row of these benchmarks was measured")
    parser.add_argument("--all", action="store_true", help="print what is the same, too")
    parser.add_argument("--other-machine", action="store_true", help="accept what depends on another machine")
    parser.add_argument("--dirty", action="store_true", help="accept what was measured with changes not committed")
    args = parser.parse_args(argv)
    try:
        path, new = load(args.files)
        if args.what == "accept":
            if not args.dirty:
                check_commits(new)
            baseline = records.read(path) if path.exists() else []
            text = records.text(accept(baseline, new, args.some, args.other_machine))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            except OSError as error:
                raise BadInput(f"{path}: can't be written: {error.strerror}") from error
            show(f"{path}: {len(new)} rows accepted")
            return 0
        if not path.exists():
            raise BadInput(f"{path}: no baseline for this device: accept one, measured on the main branch")
        findings, unmeasured = check(records.read(path), new, args.some)
    except BadInput as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    failed = any(f.verdict in FAILING for f in findings)
    show(report(findings, unmeasured, args.all) + (HINT if failed else ""))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
