#!/usr/bin/env python3
"""Training at scale by torchtitan's own Trainer, with CUDA graphs of each block, of the whole step, and with none.

    python tools/bench/titan.py --width 70B --layers 4,8 --seq 4096 --sides none,relaunch,titan,trees
    python tools/bench/titan.py --width 8B --seq 512,4096 --jsonl FILE
    python tools/bench/titan.py --width qwen3-moe --seq 4096 --batch 4
    python tools/bench/titan.py --width 8B --gate FILE                      for tools/bench/gate.py
    python tools/bench/titan.py --width 70B --layers 4 --tp 2               two GPUs share each batch
    python tools/bench/titan.py --width 70B --layers 16,24 --tp 2           eight GPUs; not run yet
    python tools/bench/titan.py --width debug --seq 64 --device cpu         two processes without a GPU

It needs torchtitan, the release that pyproject.toml pins: pip install --no-deps $(python tools/requirements.py titan)

A row is a width of torchtitan's, with the first so many of its layers, and a sequence length: FSDP2 over all GPUs of
the host, selective activation checkpointing, each block compiled, tokens drawn at random from a seed. Each side of it
is a process group of its own, in the order of the sides, and once more in the reverse order.

    none      blocks compiled, without CUDA graphs;  relaunch: with torch_overlay's graph of each block
    titan     torchtitan's own CUDA graph, of forward and backward together;  trees: cudagraph trees of each block

Sides but relaunch are stock PyTorch. Memory is that of the GPU that has most, in MiB: reserved by the allocator, the
peak of what is allocated, in use on the device (cudaMemGetInfo, without the context).

    ms a step   many steps in a row;  host: until a step returns, from idle
    first five  each alone, until the device is done; of the second process group, whose code is compiled already
    losses      of the first step and the last. Those of a side, and its gradients' norms, must be those of none, bit
                for bit, where none repeats itself. Flex attention tunes its kernels in each process, which may then
                choose others: --deterministic has all choose the same

With several numbers of layers, a second table says what a layer takes and what all layers of the model come to, on as
many GPUs. The exit status is 1 if losses differ or a side failed, 2 if an argument is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]
import titan_results  # noqa: E402  # pyrefly: ignore[missing-import]
from titan_config import depth, import_torchtitan, Row, WIDTHS  # noqa: E402  # pyrefly: ignore[missing-import]
from titan_process import SIDES  # noqa: E402  # pyrefly: ignore[missing-import]

import requirements  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNKS = 8  # in which torchtitan computes the loss of a sequence
INSTALL = "pip install --no-deps $(python tools/requirements.py titan)"
STOPPING = 45  # seconds that torchrun has to stop its ranks


# ---- process groups


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def turn(row: Row, side: str, limit: float, log: Path) -> dict[str, Any]:
    """Run the process group of a side, within `limit` seconds, and merge what its ranks answer. Their output goes to a
    file."""
    from relaunch_process import environment_of  # pyrefly: ignore[missing-import]

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(row.gpus)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port()), str(HERE / "titan_process.py")]
        command += [json.dumps(dataclasses.asdict(row)), side, folder]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment_of(SIDES[side][0]), stdout=output, stderr=subprocess.STDOUT
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                _stop(process)
                return {"error": f"the process group took longer than {limit:g} s"}
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    if len(answers) == row.gpus or any("error" in answer for answer in answers):
        return titan_results.merged(answers)
    last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return {"error": " ".join([f"the process group ended with status {status}:", *last])[:300]}


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(row: Row, sides: Sequence[str], once: bool, limit: float, logs: Path) -> dict[str, dict[str, Any]]:
    """All turns of a row: each side of it."""
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number, side in enumerate([*sides, *([] if once else reversed(sides))]):
        log = logs / f"{re.sub(r'[^0-9A-Za-z-]+', '-', row.name)}-{number}-{side}.log"
        turns[side].append(answer := turn(row, side, limit, log))
        print("  ".join(titan_results.cells(row, side, titan_results.side_of([answer]))), file=sys.stderr, flush=True)
    return {side: titan_results.side_of(turns[side]) for side in sides}


def record(path: Path, about: dict[str, Any], row: Row, sides: dict[str, dict[str, Any]]) -> None:
    """Append a JSON line for each side of a row."""
    words, _ = titan_results.compare(sides)
    with path.open("a") as file:
        for side, found in sides.items():
            line = {**about, **dataclasses.asdict(row), "row": row.name, "side": side, **found, "equal": words[side]}
            print(json.dumps(line), file=file)


def gate_row(row: Row) -> str:
    """The name of a row among all that are measured on a host."""
    choice = ", deterministic" if row.deterministic else ""
    return f"{row.name}, {row.gpus} of the GPUs, {row.attention}{choice}"


# ---- arguments


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers, like 4,8")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--width", type=records.names(WIDTHS), default=["70B"], help=f"of {', '.join(WIDTHS)}")
    parser.add_argument("--layers", type=_numbers, help="numbers of layers; 4 of 70B, 16 of 8B, else all")
    parser.add_argument("--seq", type=_numbers, default=[4096], help="tokens of a sequence (4096)")
    parser.add_argument("--batch", type=records.positive, default=1, help="sequences of a data-parallel rank (1)")
    parser.add_argument(
        "--tp", type=records.positive, default=1, help="GPUs that share a batch by tensor parallelism (1)"
    )
    parser.add_argument("--gpus", type=records.positive, help="processes; all GPUs of the host, two without one")
    parser.add_argument("--sides", type=records.names(SIDES), help=f"of {', '.join(SIDES)} (all)")
    parser.add_argument("--steps", type=records.positive, default=10, help="steps in a row, three times (10)")
    parser.add_argument("--attention", choices=("flex", "sdpa"), help="flex, torchtitan's; without a GPU sdpa")
    parser.add_argument("--deterministic", action="store_true", help="kernels that repeat themselves, chosen alike")
    parser.add_argument("--once", action="store_true", help="each side once, in one order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=records.seconds, default=600.0, help="seconds for a process group (600)")
    parser.add_argument("--logs", type=Path, help="folder for what the processes print")
    parser.add_argument("--jsonl", type=records.output, help="file to which a JSON line for each row and side is added")
    parser.add_argument("--gate", type=records.output, metavar="FILE", help="JSON lines for tools/bench/gate.py")
    return parser


def _check_install(device: str) -> str | None:
    """Import torchtitan; returns what is wrong with it."""
    pin = next(pin for pin in requirements.pins(["titan"]) if pin.startswith("torchtitan=="))
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return f"torchtitan is not installed: {INSTALL}"
    if f"torchtitan=={version}" != pin:
        return f"torchtitan {version} is installed, and this is written for {pin}: {INSTALL}"
    try:
        import_torchtitan(device)
    except ModuleNotFoundError as error:
        return f"torchtitan needs {error.name}, which is not installed: {INSTALL}"
    return None


def _check_devices(args: argparse.Namespace) -> str | None:
    """Fill in the number of processes; returns what is wrong with it."""
    import torch

    there = torch.cuda.device_count() if args.device == "cuda" else args.gpus or 2
    if not there:
        return "no GPU is there: --device cpu trains without one, on the side none alone"
    args.gpus = args.gpus or there
    if args.gpus > there:
        return f"--gpus {args.gpus}: there are {there}"
    if args.device == "cpu" and args.attention == "flex":
        return "--attention flex: torch compiles it for training on a GPU alone"
    if args.gpus % args.tp:
        return f"--tp {args.tp} doesn't divide the {args.gpus} processes: choose --gpus and --tp that go together"
    return None


def rows_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Row]:
    """Rows that the arguments ask for; fills in those that depend on others. Ends with status 2 where one is wrong."""
    for check in (lambda: _check_devices(args), lambda: _check_install(args.device)):
        if wrong := check():
            parser.error(wrong)
    possible = list(SIDES) if args.device == "cuda" else ["none"]
    args.sides = args.sides or possible
    if others := [side for side in args.sides if side not in possible]:
        parser.error(f"--sides {','.join(others)}: CUDA graphs need a GPU")
    if args.gate and args.device == "cpu":
        parser.error("--gate: only what a GPU does is compared; --jsonl writes lines of a run without one")
    args.attention = args.attention or ("flex" if args.device == "cuda" else "sdpa")
    if wrong := [seq for seq in args.seq if seq % (CHUNKS * args.tp)]:
        parser.error(f"--seq {wrong[0]} is no multiple of {CHUNKS * args.tp}: the loss has {CHUNKS} chunks, times --tp")
    rows = []
    for width, seq in itertools.product(args.width, args.seq):
        for layers in args.layers or [WIDTHS[width][2] or depth(width)]:
            if layers > depth(width):
                parser.error(f"--layers {layers}: {width} has {depth(width)}")
            same = {name: getattr(args, name) for name in ("batch", "tp", "gpus", "steps", "device", "attention")}
            rows.append(Row(width, layers, seq, deterministic=args.deterministic, **same))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    rows = rows_of(args, parser)
    about = streams.describe() | {"torchtitan": importlib.metadata.version("torchtitan")}
    cards = Counter(about["hardware"].splitlines())
    about["hardware"] = ", ".join(f"{number} x {card}" if number > 1 else card for card, number in cards.items())
    measured: dict[Row, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        for row in rows:
            measured[row] = measure(row, args.sides, args.once, args.limit, logs)
            if args.jsonl:
                record(args.jsonl, about, row, measured[row])
    records.write(args.gate, about, {"titan": {gate_row(row): titan_results.figures(s) for row, s in measured.items()}})
    print(f"{about['hardware']}, torch {about['torch, cuda, triton']}, torchtitan {about['torchtitan']}, ", end="")
    print(f"commit {about['commit']}\n\n{titan_results.table(measured, {w: depth(w) for w in args.width})}")
    return 0 if titan_results.passed(measured) else 1


if __name__ == "__main__":
    sys.exit(main())
