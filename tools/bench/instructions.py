#!/usr/bin/env python3
"""Counts the instructions that a relaunch and a region with streams take on the host, under valgrind. Needs no GPU.

    python tools/bench/instructions.py --jsonl FILE
    python tools/bench/instructions.py --comparable      only where the baseline has counts of the same machine

    region      entering and leaving a region that forks to two streams and joins them, and what it records there
    relaunch    a call of a region that has a graph of four kernels: two inputs, two outputs and the scratch have moved,
                and all four nodes are patched

The C module runs on stand-ins for the driver, whose own instructions are few. Each is called in two loops of different
length, so that what is done once drops out. The counts are those of one processor model, compiler and Python, which the
JSON lines name, and are compared only where these are the same. Variables of the caller that change what Python, the
overlay or the loader do are kept from the process (`CHANGING`).

Exit status: 0, also where nothing is counted, with a line that says why; 1 if the process failed or took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "test"), str(ROOT / "test" / "inductor")]

import counts  # noqa: E402  # pyrefly: ignore[missing-import]
import gate  # noqa: E402  # pyrefly: ignore[missing-import]
import records  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHANGING = ("TORCH_OVERLAY_", "PYTHON", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_")  # how names of variables begin
LIMIT = 900.0  # seconds for valgrind, which takes about a minute
LOOPS = 20, 50, 250  # calls; the first loop warms up
LOW, STEP = 4 << 30, 1 << 20  # bytes
_held: list[mmap.mmap] = []
_process = contextlib.ExitStack()  # what lasts as long as the process
# The commands to callgrind are instructions of the program, which valgrind's header has.
COMMANDS = r"""
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""
EVENTS = r"""
typedef void *Handle;
static int context, events;
int cuCtxGetCurrent(Handle *out) { *out = &context; return 0; }
int cuCtxPushCurrent_v2(Handle c) { return 0; }
int cuCtxPopCurrent_v2(Handle *c) { return 0; }
int cuDeviceGet(int *out, int index) { *out = index; return 0; }
int cuDevicePrimaryCtxRetain(Handle *out, int device) { *out = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuEventCreate(Handle *out, unsigned flags) { *out = (Handle)(long)(++events); return 0; }
int cuEventDestroy_v2(Handle e) { return 0; }
int cuEventRecord(Handle e, Handle s) { return 0; }
int cuStreamWaitEvent(Handle s, Handle e, unsigned f) { return 0; }
int cuStreamIsCapturing(Handle s, int *out) { *out = 0; return 0; }
int cuStreamQuery(Handle s) { return 600; }
int cuThreadExchangeStreamCaptureMode(int *mode) { static int now; int old = now; now = *mode; *mode = old; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "stand-in"; return 0; }
"""
REGION = """
def region(args):
    x, y, w = args
    args.clear()
    a = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    torch.mul(x, w, out=a)
    b = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    torch.mul(y, w, out=b)
    c = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    torch.add(a, b, out=c)
    d = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    torch.mul(w, w, out=d)
    return c, d
"""


# ---- in the process that is measured


def relaunch() -> Callable[[], Any]:
    """A call of a region that has its graph. What the stand-in driver would run is left out."""
    import torch

    from stand_ins import (
        relaunch_device,  # pyrefly: ignore[missing-import]
        relaunch_driver,  # pyrefly: ignore[missing-import]
    )
    from torch_overlay._inductor.relaunch import causes
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.runner import Runner

    _fill_low_addresses()
    device: Any = _process.enter_context(relaunch_device.fake_device())
    allocate = [device.empty]
    device.empty = lambda *args: allocate[0](*args)
    scope: dict[str, Any] = {"torch": torch, "empty_strided_cuda": device.empty}
    exec(REGION, scope)
    run = Runner(scope["region"], CodeFacts("the region", 0, static_inputs=(2,)), device)
    w, sets = torch.ones(4, 4), [(torch.ones(4, 4), torch.ones(4, 4)) for _ in range(4)]
    for x, y in sets:
        run([x, y, w])
    if run.states.try_launch is None:
        raise RuntimeError(f"the region has no graph that C launches: {causes.refusals()}")
    # What malloc takes depends on all that came before. No kernel runs any more, so memory of any size will do.
    memory = itertools.cycle([torch.empty(1 << 10) for _ in range(16)])
    allocate[0] = lambda size, stride, dtype: next(memory)
    relaunch_driver.driver().library.stub_reset()
    relaunch_driver.driver().library.stub_quiet()
    turn = itertools.cycle(sets)
    return lambda: run([*next(turn), w])


def _fill_low_addresses() -> None:
    """Under valgrind, memory is mapped below 4 GiB first, where no device's memory lies: a relaunch proves nothing of
    such addresses. Map all of it, without using it."""
    while not _held or ctypes.addressof(ctypes.c_char.from_buffer(_held[-1])) < LOW:
        _held.append(mmap.mmap(-1, STEP))


def region() -> Callable[[], Any]:
    """One call of what generated code does around its kernels, on streams that aren't the caller's."""
    from stand_ins import c_module
    from torch_overlay import csrc
    from torch_overlay._inductor.streams.region_spec import of_device, OperationKind, RegionSpec, ResultKind

    class Stream:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    streams = {number: Stream(number) for number in (9, 11, 12)}
    driver = c_module.build(EVENTS, Path(tempfile.mkdtemp()) / "libevents.so")
    spec = RegionSpec(
        device=0,
        streams=(of_device(0), 1, 2),
        events=3,
        entry=((OperationKind.RECORD, 0, 0), (OperationKind.WAIT, 0, 1), (OperationKind.WAIT, 0, 2)),
        exit=((OperationKind.WAIT, 1, 0), (OperationKind.WAIT, 2, 0)),
        results=((ResultKind.EVENT, 1), (ResultKind.RAW, 1), (ResultKind.EVENT, 2), (ResultKind.RAW, 2)),
        distinct=(0, 1, 2),
    )
    made = csrc.build(driver).events.Region(
        spec,
        types.SimpleNamespace(objects=(None, streams[11], streams[12])),
        Stream,
        lambda device: 9,
        lambda device: streams[9],
        lambda stream: stream,
        lambda entering: None,
    )

    def call() -> None:
        frame, one, raw_one, two, raw_two = made.enter()
        one.record(raw_one)
        two.record(raw_two)
        frame.leave()

    return call


CASES = {"region": region, "relaunch": relaunch}


def run(folder: Path) -> None:
    """Run the loops of each case, between commands to callgrind."""
    from stand_ins import c_module

    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    commands = ctypes.CDLL(c_module.build(COMMANDS, folder / "libcommands.so"))
    for make in CASES.values():
        call = make()
        gc.collect()
        gc.disable()
        for loop in LOOPS:
            turns = range(loop)
            commands.begin()
            for _ in turns:
                call()
            commands.end()
        gc.enable()
    sys.stdout.flush()
    os._exit(0)


# ---- in the process that measures


def measure(script: str = __file__) -> dict[str, float]:
    """Instructions a call, by case. Raises RuntimeError, with what the process said, if it failed or took longer than
    LIMIT. `script` is what runs the cases for `--run FOLDER`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(CHANGING)}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [*valgrind, sys.executable, script, "--run", folder]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"valgrind took longer than {LIMIT:g} s: measure on a machine that is less busy"
            ) from error
        dumps = [Path(f"{out}.{i + 1}") for i in range(len(CASES) * len(LOOPS))]
        found = [re.search(r"^totals: (\d+)", d.read_text(), re.MULTILINE) for d in dumps if d.exists()]
    totals = [int(match[1]) for match in found if match]
    if len(totals) < len(dumps):
        raise RuntimeError(f"the process ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    _, few, many = LOOPS
    ends = zip(CASES, totals[1 :: len(LOOPS)], totals[2 :: len(LOOPS)])
    return {name: (more - less) / (many - few) for name, less, more in ends}


def depends() -> dict[str, str]:
    """Names of all that instruction counts depend on."""
    from triton.runtime.build import _find_compiler

    def first_line(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].strip()

    built = shlex.split(sysconfig.get_config_var("CONFIG_ARGS") or "")
    return {
        "processor": counts.processor(),
        "compiler": first_line(_find_compiler("c"), "--version"),
        "libc": " ".join(platform.libc_ver()),
        "python": f"Python {' '.join(sys.version.split())}",
        "options of its build": " ".join(option for option in built if "/" not in option),  # a folder counts nothing
        "valgrind": first_line("valgrind", "--version"),
    }


def missing() -> str:
    """A sentence on what this needs and doesn't find; empty if all is there."""
    from triton.runtime.build import _find_compiler

    compiler = _find_compiler("c")
    try:
        preprocessed = subprocess.run([compiler, "-E", "-x", "c", "-"], input=COMMANDS, capture_output=True, text=True)
    except OSError as error:
        return f"the compiler {compiler!r} can't be run ({error.strerror}): CC names one program, without arguments"
    there = shutil.which("valgrind") and not preprocessed.returncode
    return "" if there else "valgrind and its header callgrind.h are not installed"


def incomparable() -> str:
    """In what this machine differs from that of the baseline; empty if in nothing, or if the baseline has no counts."""
    here = records.Record("instructions", "", {"depends": depends()}, {})
    found = [record for record in records.read(gate.BASELINE / "cpu.jsonl") if record.bench == here.bench]
    return gate.difference_of_machines(found[0], here) if found else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--comparable", action="store_true", help="count nothing that gate.py would skip")
    records.add_option(parser)
    args = parser.parse_args(argv)
    if args.run:
        run(args.run)
    if what := missing() or (args.comparable and incomparable()):
        print(f"instructions are not counted: {what}")
        return 0
    try:
        found = measure()
    except RuntimeError as error:
        print(f"instructions are not counted: {error}", file=sys.stderr)
        return 1
    for name, count in found.items():
        print(f"{name}: {count:.0f} instructions a call")
    rows = {name: {"instructions": {"a call": [count]}} for name, count in found.items()}
    records.write(args.jsonl, {**counts.describe(), "depends": depends()}, {"instructions": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
