"""Runs a program on its sides and compares them. On a GPU also: graphs were launched, and nothing is left behind.

Without a GPU the sides are eager twice, which must agree bit by bit (the program's own check: no side depends on
addresses, on time or on the other), and `traced`, which shows that Dynamo and AOTAutograd take the program.
"""

import contextlib
import dataclasses
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree

from relaunch_programs._needs import NEEDS
from relaunch_programs._program import Kit, Program


SLACK = 2048  # bytes that a run may leave in the allocator


class Mismatch(AssertionError):
    pass


@dataclasses.dataclass(frozen=True)
class Settings:
    """`graphs` is the overlay's option `cudagraphs`; counters and leaks are looked at for "relaunch" only. With
    `policy` there is no seam in the process, and Inductor asks our policy."""

    device: str
    graphs: str = "relaunch"
    verify: bool = False
    policy: bool = False
    timeout: float = 100.0

    def options(self) -> dict[str, Any]:
        return {"cudagraphs": self.graphs, "cudagraph_verify": self.verify}

    def environment(self) -> dict[str, str]:
        """The same for every thread of a process."""
        return (
            {f"TORCH_OVERLAY_{name.upper()}": str(value) for name, value in self.options().items()}
            | {
                f"TORCH_OVERLAY_{name.upper()}": "1" if value else "0"
                for name, value in self.options().items()
                if isinstance(value, bool)
            }
            | ({"TORCH_OVERLAY_DISABLE": "1"} if self.policy else {})
        )


def check(program: Program, settings: Settings) -> None:
    """Raise at the first difference. Programs of several ranks start their processes."""
    if program.ranks > 1 and not _in_a_group():
        check_ranks(program, settings)
    elif settings.device == "cpu":
        check_without_gpu(program)
    else:
        check_on_gpu(program, settings)


def check_without_gpu(program: Program) -> None:
    want = run(program, "eager", "cpu")
    _compare("eager, once more", want, run(program, "eager", "cpu"), 0.0)
    if program.random:
        return
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    _compare("traced, against eager", want, run(program, "traced", "cpu"), program.loose)
    if program.launches and stats["unique_graphs"] == before:
        raise Mismatch("Dynamo made no graph of it, so there is nothing to relaunch")


def check_on_gpu(program: Program, settings: Settings) -> None:
    wanted = {oracle: run(program, oracle, "cuda") for oracle in program.oracles}
    before = footprint() if settings.graphs == "relaunch" else {}
    start = counted()
    with options(program, settings):
        got = run(program, "graphs", "cuda")
    for oracle, want in wanted.items():
        loose = program.loose * (0.1 if oracle == "plain" else 1.0)
        _compare(f"with graphs, against {oracle}", want, got, loose, strides=oracle == "plain")
    if settings.graphs != "relaunch":
        return
    if not (settings.policy and program.name in NEEDS):
        _check_counters(program, start, settings.verify)
    del got, wanted
    left = growth(before, first := footprint())
    if left and not program.alone:
        # What was there only the first time is a cache of the process.
        with options(program, settings):
            run(program, "graphs", "cuda")
        again = growth(first, footprint())
        left = {what: count for what, count in again.items() if what in left}
        if left:
            raise Mismatch(f"left behind by every run: {left}")


def run(program: Program, side: str, device: str) -> list[tuple[str, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    kit = Kit(side, device)
    try:
        program.body(kit)
        kit.synchronize()
        return [(what, pytree.tree_map(_to_host, value)) for what, value in kit.seen]
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def options(program: Program, settings: Settings) -> Iterator[None]:
    if os.environ.get("TORCH_OVERLAY_DISABLE") == "1" and not settings.policy:
        yield
        return
    from torch_overlay import config
    from torch_overlay._inductor.relaunch import governor
    from torch_overlay._inductor.relaunch.governor import Governor

    with contextlib.ExitStack() as stack:
        # Programs call few times: each size is captured at once.
        stack.enter_context(mock.patch.object(Governor, "affords_capture", lambda *given: not program.steps))
        stack.enter_context(mock.patch.object(governor, "FEW", 0 if program.steps else 1 << 30))
        stack.enter_context(config.patch(**settings.options(), **program.config))
        if settings.policy:
            from torch_overlay.cudagraphs import RelaunchPolicy

            stack.enter_context(torch._inductor.config.patch(cudagraph_policy=RelaunchPolicy()))
        yield


def _to_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


# ---- values


def _compare(
    what: str, want: list[tuple[str, Any]], got: list[tuple[str, Any]], loose: float, strides: bool = False
) -> None:
    if [label for label, _ in want] != [label for label, _ in got]:
        raise Mismatch(f"{what}: saw {[label for label, _ in got]}, expected {[label for label, _ in want]}")
    seen: dict[str, int] = {}
    for (label, expected), (_, value) in zip(want, got):
        number = seen[label] = seen.get(label, -1) + 1
        place = f"{what}: {label!r}, time {number}"
        wanted, spec = pytree.tree_flatten(expected)
        leaves, other = pytree.tree_flatten(value)
        if spec != other:
            raise Mismatch(f"{place}: structure {other}, expected {spec}")
        for index, (a, b) in enumerate(zip(wanted, leaves)):
            _compare_leaf(f"{place}, value {index}", a, b, loose, strides)


def _compare_leaf(place: str, want: Any, have: Any, loose: float, strides: bool) -> None:
    """`loose` is a factor on the tolerance of the overlay's own comparison. Against the same code without graphs it is
    a tenth: partitions may be scheduled in another order."""
    from torch_overlay._inductor.relaunch.verify import tolerance_of

    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        if want != have:
            raise Mismatch(f"{place}: {have!r}, expected {want!r}")
        return
    if (want.shape, want.dtype) != (have.shape, have.dtype):
        raise Mismatch(f"{place}: {have.dtype}{[*have.shape]}, expected {want.dtype}{[*want.shape]}")
    if strides and want.stride() != have.stride():
        raise Mismatch(f"{place}: strides {have.stride()}, expected {want.stride()}")
    if not want.numel():
        return
    tolerance = tolerance_of(want.dtype) * loose
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.to(wide), have.to(wide)
    scale = max(1.0, torch.nan_to_num(a.abs(), 0.0, 0.0, 0.0).max().item())
    close = torch.isclose(b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if close.all():
        return
    wrong = (~close).nonzero()
    at = tuple(wrong[0].tolist())
    raise Mismatch(
        f"{place}: {len(wrong)} of {want.numel()} elements of {want.dtype}{[*want.shape]} differ, first at {at}: "
        f"{b[at].item()}, expected {a[at].item()}"
    )


# ---- graphs were launched


def counted() -> dict[str, int]:
    from torch_overlay._inductor.relaunch.capture import calls

    return {**torch._dynamo.utils.counters["torch_overlay"], "library_calls": calls.launched()}


def _check_counters(program: Program, start: dict[str, int], verify: bool = False) -> None:
    now = counted()
    launched, captured, refused, steps = (
        now.get(name, 0) - start.get(name, 0)
        for name in ("cudagraph_relaunches", "cudagraph_captures", "cudagraph_refusals", "cudagraph_steps")
    )
    reasons = "; ".join(overlay_says(*REFUSALS, [])[-3:])
    if refused and not program.refusals:
        raise Mismatch(f"{refused} refusals: {reasons}")
    if program.steps:
        if steps < program.steps and not verify:
            raise Mismatch(f"{steps} calls ran as steps, expected at least {program.steps} ({reasons})")
        entries = now["library_calls"] - start["library_calls"]
        if entries < program.library_calls and not verify:
            raise Mismatch(f"{entries} calls of libraries were launched, expected at least {program.library_calls}")
    elif launched < program.launches:
        raise Mismatch(
            f"{launched} graph launches, expected at least {program.launches} "
            f"({captured} captures, {refused} refusals: {reasons})"
        )
    if program.captures is not None and captured > program.captures:
        raise Mismatch(f"{captured} captures, expected at most {program.captures}")


REFUSALS, ALIVE = ("causes", "refusals"), ("runners", "counts")  # module and function


def overlay_says(module: str, name: str, default: Any) -> Any:
    """What a function of a module of relaunches returns; the default if nobody has loaded that."""
    places = (f"{package}._inductor.relaunch.{module}" for package in ("torch_overlay", "torch._overlay"))
    found = next((sys.modules[place] for place in places if place in sys.modules), None)
    return default if found is None else getattr(found, name)()


def summary() -> list[str]:
    """What became of the regions of this process."""
    now = counted()
    counts = [f"{now.get('cudagraph_' + name, 0)} {name}" for name in ("captures", "relaunches", "refusals")]
    return [", ".join(counts), *overlay_says(*REFUSALS, [])]


# ---- nothing is left behind


def footprint() -> dict[str, int]:
    """What is alive in this process: memory of the allocator, pools, graphs, tensors, templates.

    Fake tensors have no memory. The compiler keeps some, with or without graphs: a cache of Inductor's, of a fixed
    size, holds nodes of graphs (`SIMDScheduling.candidate_tilings`), and Dynamo keeps functions with a graph break.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._subclasses.fake_tensor import FakeTensor

    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    for _ in range(3):
        gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # Other allocators than torch's own have no pools and give no account.
    native = torch.cuda.get_allocator_backend() == "native"
    snapshot = torch.cuda.memory_snapshot() if native else []
    private = [s for s in snapshot if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    found = {
        "bytes allocated": torch.cuda.memory_allocated(),
        "private pools": len({tuple(s["segment_pool_id"]) for s in private}),
        "bytes in private pools": sum(s["total_size"] for s in private),
    }
    kinds = {torch.cuda.CUDAGraph: "graphs", torch.cuda.MemPool: "pool objects", torch.cuda.Event: "events"}
    found |= dict.fromkeys(kinds.values(), 0) | {"tensors": 0}
    for thing in gc.get_objects():
        cls = type(thing)
        if cls in kinds:
            found[kinds[cls]] += 1
        elif issubclass(cls, torch.Tensor) and cls is not FakeTensor and thing.is_cuda:
            found["tensors"] += 1
    return found | overlay_says(*ALIVE, {})


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    more = {what: count - before.get(what, 0) for what, count in after.items()}
    return {what: n for what, n in more.items() if n > (SLACK if what.startswith("bytes") else 0)}


# ---- several ranks


def _in_a_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_ranks(program: Program, settings: Settings) -> None:
    """One process a rank; the first complaint of one of them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here = Path(__file__).resolve().parents[1]
    python_path = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
    shared = {**os.environ, "PYTHONPATH": python_path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "relaunch_programs._rank", program.name, json.dumps(dataclasses.asdict(settings))]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(program.ranks)]
        processes = []
        for rank, log in enumerate(logs):
            environment = {**shared, "RANK": str(rank), "WORLD_SIZE": str(program.ranks), "OMP_NUM_THREADS": "1"}
            with open(log, "w") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        try:
            codes = _wait(processes, settings.timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text() for log in logs]
    print(*texts, file=sys.stderr)
    for rank, (code, text) in enumerate(zip(codes, texts)):
        if code:
            last = [line for line in text.splitlines() if line.strip()][-1:]
            raise Mismatch(f"rank {rank} ended with status {code}: {' '.join(last)}")
    if None in codes:
        raise Mismatch(f"rank {codes.index(None)} did not end in {settings.timeout:.0f} s")


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Exit codes; None for a rank that is still running when another one failed, or at the end of the time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [p.poll() for p in processes]
        if None not in codes or any(codes):
            return codes
        time.sleep(0.1)
    return [p.poll() for p in processes]
