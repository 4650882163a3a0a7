#!/usr/bin/env python3
"""Programs that people write around their libraries, with no graph, with stock's cudagraph trees, and with the overlay.

    python tools/bench/clients.py --out DIR [--rows trainer,nanogpt] [--sides off,trees,relaunch] [--rounds 3]
    python tools/bench/clients.py --jobs 6 ...                 whether the values are equal, and no times
    python tools/bench/clients.py --together 8 ...             eight rows warm up at a time, and are measured alone
    python tools/bench/clients.py --sides off,code ...         what code for graphs computes without them
    python tools/bench/clients.py --device cpu --jobs 2 ...    whether they run at all: small, and traced, not compiled

A row is a program of `client_rows`, each side of it a process of its own with compile caches of its own: `off` is stock
without graphs, `trees` stock under mode="reduce-overhead", `relaunch` the same with the overlay, and `code`, if asked
for, stock under that mode whose code runs without graphs. A process that fails, or takes longer than --timeout, costs
its own cells. The sides of a row warm up one after another, those of rows --together at once; then each measures alone,
in both orders; another of the `--rounds` has new processes and the caches of the one before.

    values    bits: those of `off`, bit for bit; noise: they differ by as much as those of further processes of `off`,
              which run only where some side isn't equal; else the largest difference relative to a tensor's largest
              value, and that of the first tensor that differs. Without --autotune all of them choose kernels without
              measuring (Inductor's `deterministic`), which may be slower ones
    ms        a step: the median over the --turns; without what a library does once, before and after its loop
    reserved, device    MiB of the allocator, and of the device since the process began to use it
    warm-up   s until the program has run a few times: of the first round, and with warm caches, of the last one; with
              --together, others run beside it
    captures  of graphs;  in graphs: percentage of kernels of generated code (with the overlay)

Files in --out: clients.jsonl has a line for each row, logs/ the standard error of each process, caches/ the compile
caches. --markdown FILE has the table, and --jsonl FILE, with --rounds 3, the lines for tools/bench/gate.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]
from models import Process, serve  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

SIDES = ("off", "trees", "relaunch")
CODE = "code"  # code for graphs without them
AGAINS = 3  # further processes without graphs, where a side's values are different
KINDS = {  # -> environment, mode for graphs?
    "off": ("stock", False),
    "trees": ("stock", True),
    "relaunch": ("relaunch", True),
    CODE: ("stock", True),
    **{f"again {n}": ("stock", False) for n in range(AGAINS)},
}
OPTIONS = "CLIENTS_OPTIONS"  # variable of the environment of a process: JSON of the device, the steps and the folders
LIKE_NOISE = 3.0  # times that a side may differ by more than processes without graphs do
TURNS = 3  # times of a turn

Answer = dict[str, Any]
Warm = dict[str, tuple[Process, Answer]]  # side -> its process, and what it answered


# ---- a process of one row and side


def seen(tensors: Iterable[torch.Tensor], file: Path) -> Answer:
    """A digest of all values, whether they are finite, and the file that has them."""
    import torch

    flat = [tensor.detach().reshape(-1).contiguous().cpu() for tensor in tensors]
    digest = hashlib.sha256()
    for values in flat:
        digest.update(values.view(torch.uint8).numpy().tobytes())
    torch.save(flat, file)
    finite = all(bool(values.isfinite().all()) for values in flat)
    return {"digest": digest.hexdigest(), "finite": finite, "file": str(file)}


class _Served:
    def __init__(self, row: str, side: str) -> None:
        options = json.loads(os.environ[OPTIONS])
        self.row, self.used = row, 0.0
        self.device, self.steps, self.folder = (options[key] for key in ("device", "steps", "folder"))
        Path(options["log"]).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        self.kind, self.graphs = KINDS[side]
        if self.kind == "relaunch":
            import torch_overlay  # noqa: F401
        if side == CODE:
            import torch._inductor.compile_fx

            inductor: Any = torch._inductor.compile_fx
            inductor.cudagraphify = lambda model, **_: model
        if self.device == "cpu":
            import torch._inductor.compile_fx
            from torch._dynamo.backends.debugging import aot_eager

            compile_fx: Any = torch._inductor.compile_fx
            compile_fx.compile_fx = lambda model, inputs, **_: aot_eager(model, inputs)

    def ready(self) -> Answer:
        """Import what the row needs, which touches no device."""
        from client_rows import LIBRARIES  # pyrefly: ignore[missing-import]

        for library in LIBRARIES[self.row]:
            importlib.import_module(library)
        return {}

    def warm(self) -> Answer:
        import torch
        from client_rows import ROWS, Use  # pyrefly: ignore[missing-import]
        from torch._dynamo.utils import counters

        self.base = self._device_used()
        start = time.perf_counter()
        torch.manual_seed(0)
        self.client = ROWS[self.row](Use(self.device, self.graphs, Path(self.folder)))
        kept: list[torch.Tensor] = []
        for call in range(max(4 if self.client.steps > 1 else 6, 3 * self.client.cycle)):
            torch.manual_seed(1 + call)
            kept += [tensor.detach().clone() for tensor in self.client.step()]
        self._wait()
        seconds, functions = time.perf_counter() - start, counters["stats"]["unique_graphs"]
        if not functions:
            raise RuntimeError("nothing was compiled")
        found = {
            "warm s": seconds,
            "functions": functions,
            **seen([*kept, *self.client.state()], Path(self.folder, "values.pt")),
        }
        return found | self._memory() | self._graphs()

    def measure(self) -> Answer:
        calls = math.ceil(self.steps / TURNS / self.client.steps / self.client.cycle) * self.client.cycle
        self.base = self._device_used() - self.used  # other processes came since
        times = []
        for _ in range(TURNS):
            self._wait()
            start, loops = time.perf_counter(), 0.0
            for _ in range(calls):
                self.client.step()
                loops += self.client.loop() if self.client.loop else 0.0
            self._wait()
            seconds = loops or time.perf_counter() - start
            times.append(seconds * 1e3 / calls / self.client.steps)
        return {"ms": statistics.median(times)} | self._memory()

    def _wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _device_used(self) -> float:
        import torch
        from relaunch_process import device_used, MIB  # pyrefly: ignore[missing-import]

        if self.device != "cuda":
            return 0.0
        torch.zeros(1, device="cuda")
        return device_used() / MIB

    def _memory(self) -> Answer:
        import torch

        if self.device != "cuda":
            return {}
        self.used = self._device_used() - self.base
        return {"reserved MiB": torch.cuda.memory_reserved() / 2**20, "device MiB": self.used}

    def _graphs(self) -> Answer:
        import torch
        from torch._dynamo.utils import counters

        if self.kind == "relaunch":
            import torch_overlay

            found = torch_overlay.coverage()
            share = {"in graphs": found.share} if found.kernels_in_graphs + found.kernels_outside else {}
            return {"captures": counters["torch_overlay"]["cudagraph_captures"], "outside": str(found), **share}
        if not self.graphs or self.device != "cuda":
            return {"captures": 0}
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        skips = counters["inductor"]["cudagraph_skips"]
        return {"captures": int(manager.new_graph_id().id) if manager else 0, "skips": skips}


# ---- the rows


def differences(mine: Answer, plain: Answer) -> list[float]:
    """Of each tensor the largest difference of two values, relative to its largest value."""
    import torch

    ours, theirs = ([values.double() for values in torch.load(answer["file"])] for answer in (mine, plain))
    if [len(v) for v in ours] != [len(v) for v in theirs]:
        return [math.inf]
    apart = [(a - b).abs().max().item() / (b.abs().max().item() or 1.0) for a, b in zip(ours, theirs) if len(b)]
    return [math.inf if math.isnan(each) else each for each in apart]


def noise_of(again: Sequence[Answer], plain: Answer) -> tuple[float, str]:
    """The largest difference of the further processes without graphs, and the text that says so."""
    others = [other for other in again if other.get("digest", plain["digest"]) != plain["digest"]]
    noise = max((d for other in others for d in differences(other, plain)), default=0.0)
    return noise, f"off {noise:.1g} in {len(others)} of {len(again)}"


def equality(mine: Answer, plain: Answer, noise: float, off: str) -> tuple[str, bool]:
    """The cell about values, and whether they count as equal to those without graphs."""
    if not plain["finite"]:
        return "not finite without graphs", False
    if mine["digest"] == plain["digest"]:
        return "bits", True
    apart = differences(mine, plain)
    largest = max(apart, default=0.0)
    if noise > 0 and largest <= LIKE_NOISE * noise:
        return f"noise ({largest:.1g}; {off})", True
    first = next((f"{each:.1g} in {n} of {len(apart)}" for n, each in enumerate(apart, 1) if each), "none")
    return f"DIFFER by {largest:.1g} (first {first}; {off})", False


class Runs:
    """Starts the processes of one command, and keeps their folders."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + args.limit
        self.scratch = tempfile.TemporaryDirectory(prefix="clients")
        self.out = args.out or Path(self.scratch.name)
        self.threads = max(1, (os.cpu_count() or 1) // (args.jobs * args.together))

    def start(self, row: str, side: str) -> Process:
        from relaunch_process import environment_of  # pyrefly: ignore[missing-import]

        name = f"{row} {side}".replace(" ", "-")
        folder = Path(tempfile.mkdtemp(prefix="run", dir=self.scratch.name))
        caches = self.out.resolve() / "caches" / name
        options = {"device": self.args.device, "steps": self.args.steps, "folder": str(folder)}
        options["log"] = str(self.out.resolve() / "logs" / f"{name}.txt")
        own = {
            OPTIONS: json.dumps(options),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.threads),
            "TORCHINDUCTOR_DETERMINISTIC": str(int(not self.args.autotune)),  # of all threads
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if self.args.device == "cuda" else ""
        own["CUDA_VISIBLE_DEVICES"] = gpus.partition(",")[0]  # or Trainer takes all of them
        return Process(row, side, environment_of(KINDS[side][0]) | own, __file__)

    def ask(self, process: Process, *words: str) -> Answer:
        """Tell a process these words, one after another, until one fails."""
        found: Answer = {}
        end = min(self.deadline, time.monotonic() + self.args.timeout)
        for word in words:
            if time.monotonic() > self.deadline:
                return {"error": "out of time"}
            process.tell(word)
            found |= process.answer(end - time.monotonic())
            if "error" in found:
                break
        return found

    def once(self, row: str, side: str) -> Answer:
        """The values of one process."""
        if time.monotonic() > self.deadline:
            return {"error": "out of time"}
        start, process = time.monotonic(), self.start(row, side)
        try:
            found = self.ask(process, "ready", "warm")
        finally:
            process.stop()
        found.pop("device MiB", None)  # others may run beside it
        told = f"{row}, {side}: {time.monotonic() - start:.0f} s  {first_line(found.get('error', ''))}"
        print(told, file=sys.stderr, flush=True)
        return found

    def warm(self, row: str, sides: Sequence[str]) -> Warm:
        """The sides of a row, warmed up one after another, or at once where several rows are."""
        processes = {side: self.start(row, side) for side in sides}
        with concurrent.futures.ThreadPoolExecutor(len(sides) if self.args.together > 1 else 1) as pool:
            answers = list(pool.map(lambda each: self.ask(each, "ready", "warm"), processes.values()))
        return {s: (each, answer | {"turns": []}) for (s, each), answer in zip(processes.items(), answers)}

    def turns(self, warm: Warm) -> dict[str, Answer]:
        """The sides of a row measured in both orders."""
        found = {side: answer for side, (_, answer) in warm.items()}
        for side in [*warm, *reversed(warm)] * self.args.turns:
            if "error" not in found[side]:
                turn = self.ask(warm[side][0], "measure")
                found[side] |= turn
                found[side]["turns"].append(turn)
        if self.args.together > 1:  # others have memory of the device
            for each in [*found.values(), *(turn for answer in found.values() for turn in answer["turns"])]:
                each.pop("device MiB", None)
        return found


def merged(rounds: Sequence[dict[str, Answer]], again: Sequence[Answer] = ()) -> dict[str, Answer]:
    """One answer for each side, of all rounds: an error of any of them, the medians of the turns, the last values."""
    found: dict[str, Answer] = {}
    for side in dict.fromkeys(side for each in rounds for side in each):
        answers = [each[side] for each in rounds if side in each]
        errors = [a["error"] for a in answers if "error" in a]
        if errors:
            found[side] = {"error": errors[0]}
            continue
        turns = [turn for a in answers for turn in a.get("turns", ())]
        found[side] = answers[-1] | {"turns": turns, "cold s": answers[0]["warm s"], "rounds": len(answers)}
        for key in ("ms", "reserved MiB", "device MiB"):
            if values := [turn[key] for turn in turns if key in turn]:
                found[side][key] = statistics.median(values)
    plain = found.get("off", {})
    if "digest" in plain:
        noise = noise_of(again, plain)
        for answer in (answer for answer in found.values() if "digest" in answer):
            answer["values"], answer["equal"] = equality(answer, plain, *noise)
    return found


def unequal(sides: Mapping[str, Answer]) -> bool:
    return len({answer["digest"] for answer in sides.values() if "digest" in answer}) > 1


def measure(runs: Runs, rows: Sequence[str], sides: Sequence[str]) -> Iterator[tuple[str, dict[str, Answer]]]:
    """The rows in turn, each alone when all of its group are warm."""
    together = runs.args.together
    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        for begin in range(0, len(rows), together):
            group = rows[begin : begin + together]
            found: dict[str, list[dict[str, Answer]]] = {row: [] for row in group}
            for _ in range(runs.args.rounds):
                if time.monotonic() > runs.deadline:
                    break
                with contextlib.ExitStack() as stack:
                    warm = list(pool.map(runs.warm, group, [sides] * len(group)))
                    for process, _ in itertools.chain(*(each.values() for each in warm)):
                        stack.callback(process.stop)
                    for row, each in zip(group, warm):
                        found[row].append(runs.turns(each))
            rows_again = [row for row, rounds in found.items() if rounds and unequal(rounds[-1])]
            again = {row: [pool.submit(runs.once, row, f"again {n}") for n in range(AGAINS)] for row in rows_again}
            for row, rounds in found.items():
                rounds = rounds or [{side: {"error": "out of time"} for side in sides}]
                yield row, merged(rounds, [future.result() for future in again.get(row, ())])


def compare(
    runs: Runs, rows: Sequence[str], sides: Sequence[str], pool: concurrent.futures.Executor
) -> Iterator[tuple[str, dict[str, Answer]]]:
    """The rows in turn, as many processes at a time as the pool has, and no times."""
    futures = {row: {side: pool.submit(runs.once, row, side) for side in sides} for row in rows}
    first: dict[str, dict[str, Answer]] = {}
    again: dict[str, list[concurrent.futures.Future[Answer]]] = {}
    for row in rows:
        first[row] = {side: future.result() for side, future in futures[row].items()}
        again[row] = [pool.submit(runs.once, row, f"again {n}") for n in range(AGAINS)] if unequal(first[row]) else []
    for row in rows:
        yield row, merged([first[row]], [future.result() for future in again[row]])


# ---- what comes out


HEADER = ("row", "side", "values", "ms", "ratio", "reserved", "device", "warm-up s", "captures", "in graphs", "")


def ratio(sides: Mapping[str, Answer], side: str) -> float | None:
    """The side's time to the least of the others."""
    others = [a["ms"] for name, a in sides.items() if name != side and "ms" in a]
    mine = sides[side].get("ms")
    return mine / min(others) if mine is not None and others else None


def first_line(error: str) -> str:
    return (error.strip().splitlines() or [""])[0][:120]


def cells(row: str, sides: Mapping[str, Answer]) -> list[list[str]]:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = []
    for side, found in sides.items():
        warm = number(found.get("cold s"), 1)
        if found.get("rounds", 1) > 1:
            warm += f", {found['warm s']:.1f}"
        captures = str(found.get("captures", "-")) + (f", {found['skips']} skipped" if found.get("skips") else "")
        share = f"{found['in graphs']:.1%}" if "in graphs" in found else "-"
        times = number(found.get("ms"), 3), number(ratio(sides, side) if side == "relaunch" else None, 3)
        memory = [number(found.get(key), 0) for key in ("reserved MiB", "device MiB")]
        error = first_line(found.get("error", ""))
        values = found.get("values", "-")
        lines.append(["" if lines else row, side, values, *times, *memory, warm, captures, share, error])
    return lines


def table(rows: Mapping[str, Mapping[str, Answer]]) -> str:
    return "\n".join(streams.aligned([HEADER, *(line for row, sides in rows.items() for line in cells(row, sides))]))


def markdown(rows: Mapping[str, Mapping[str, Answer]]) -> str:
    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    lines = [line(HEADER), "|" + "---|" * len(HEADER)]
    return "\n".join([*lines, *(line(texts) for row, sides in rows.items() for texts in cells(row, sides))]) + "\n"


def figures(sides: Mapping[str, Answer]) -> records.Figures:
    """Figures for the gate: a sample is of one turn, divided by that of the other side's."""
    turns = {side: answer.get("turns", []) for side, answer in sides.items()}
    mine = turns.pop("relaunch", [])
    pairs = {f"ms / {other}": ([t["ms"] for t in mine], [t["ms"] for t in theirs]) for other, theirs in turns.items()}
    found: records.Figures = {"wall time": {name: records.ratios(*pair) for name, pair in pairs.items()}}
    found["bytes"] = records.samples(mine, ("reserved MiB", "device MiB")) if mine else {}
    found["count"] = records.samples([sides["relaunch"]], ["captures"]) if mine else {}
    return found


def failed(sides: Mapping[str, Answer]) -> bool:
    """Whether a row has no result of ours, or a wrong one. Where trees fail, nothing of ours does."""
    ours = [answer for side, answer in sides.items() if side != "trees"]
    return any("error" in answer or answer.get("equal") is False for answer in ours)


def main(argv: Sequence[str] | None = None) -> int:
    from client_rows import ROWS  # pyrefly: ignore[missing-import]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("ROW", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=records.names(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    known = [*SIDES, CODE]
    parser.add_argument("--sides", type=records.names(known), default=list(SIDES), help=f"of {', '.join(known)}")
    parser.add_argument("--steps", type=records.positive, default=96, help="steps of a turn")
    parser.add_argument("--rounds", type=records.positive, default=1, help="rounds, each of new processes")
    parser.add_argument("--turns", type=records.positive, default=1, help="pairs of turns of a side in a round")
    parser.add_argument("--jobs", type=records.positive, default=1, help="processes at a time; with several, no times")
    parser.add_argument("--together", type=records.positive, default=1, help="rows that warm up at a time")
    parser.add_argument("--timeout", type=records.seconds, default=240.0, help="seconds for one process")
    parser.add_argument("--limit", type=records.seconds, default=3600.0, help="seconds for all")
    parser.add_argument("--autotune", action="store_true", help="each process chooses its kernels by measuring")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for JSON lines, logs and caches")
    parser.add_argument("--markdown", type=records.output, metavar="FILE", help="the table as markdown")
    records.add_option(parser)
    args = parser.parse_args(argv)
    if args.serve:
        serve(lambda: _Served(*args.serve))
    runs = Runs(args)
    about, found = streams.describe(), {}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "clients.jsonl").write_text("")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        if args.jobs > 1 or args.device == "cpu":
            results = compare(runs, args.rows, args.sides, pool)
        else:
            results = measure(runs, args.rows, args.sides)
        for row, sides in results:  # of a command that is stopped, the rows before are kept
            found[row] = sides
            for line in cells(row, sides):
                print("  ".join([row, *line[1:]]), file=sys.stderr, flush=True)
            if args.out:
                with (args.out / "clients.jsonl").open("a") as file:
                    file.write(json.dumps({**about, "row": row, "sides": without_files(sides)}) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(found))
    records.write(args.jsonl, about, {"clients": {row: figures(sides) for row, sides in found.items()}})
    print(f"{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}\n\n{table(found)}")
    shutil.rmtree(runs.scratch.name, ignore_errors=True)
    return 1 if any(map(failed, found.values())) else 0


def without_files(sides: Mapping[str, Answer]) -> dict[str, Answer]:
    return {side: {k: v for k, v in answer.items() if k != "file"} for side, answer in sides.items()}


if __name__ == "__main__":
    sys.exit(main())
