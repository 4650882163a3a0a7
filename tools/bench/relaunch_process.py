"""Measures one row of the relaunch benchmark on one side, in this process; run by relaunch.py (`processes`).

    python tools/bench/relaunch_process.py --serve ROW SIDE

To "ready" it imports what it needs, and touches no device; "warm" fills the compile caches; "measure" measures.

Until the graphs are made, Python's garbage collector runs where the process asks for it alone: it walks all that
compiling has made, which takes longer than a capture, and whether it comes by in the graph layer is chance.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from relaunch_rows import ROWS  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = float(1 << 20)
CYCLES = 2000  # of the device in a microsecond, and rather more than fewer
# side -> variables of the environment, compiled with graphs?
SIDES: dict[str, tuple[dict[str, str], bool]] = {
    "off": ({"TORCH_OVERLAY_CUDAGRAPHS": "off"}, False),
    "trees": ({"TORCH_OVERLAY_CUDAGRAPHS": "trees"}, True),
    "stock": ({"TORCH_OVERLAY_DISABLE": "1"}, True),
    "relaunch": ({"TORCH_OVERLAY_CUDAGRAPHS": "relaunch"}, True),
    "chain": ({"TORCH_OVERLAY_CUDAGRAPHS": "relaunch", "TORCH_OVERLAY_CUDAGRAPH_CONCURRENCY": "0"}, True),
    "replay": ({"TORCH_OVERLAY_CUDAGRAPHS": "off"}, False),
}


def environment_of(side: str) -> dict[str, str]:
    """The environment of a process that measures a side: this one's, with the options of the side alone."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OVERLAY_")} | SIDES[side][0]


RELAUNCH = ("relaunch", "chain")  # chain: with nothing side by side


def gpu_time(step: Callable[[], Any], calls: int = 20, rounds: int = 9, busy: float = 0.0) -> float:
    """Microseconds a step, many of them in a row, between two events on the device. Median of the rounds. The device is
    kept `busy` for so many microseconds before the first step begins."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(int(busy * CYCLES))
        begin.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def queued_time(step: Callable[[], Any], host: float, calls: int = 5) -> float:
    """Like `gpu_time`, with the steps launched while the device is busy with something else: no step waits for a host
    that needs `host` microseconds for one. The queue takes about a thousand launches; more wait for the host anyway."""
    return gpu_time(step, calls, rounds=5, busy=2 * calls * host + 500)


def host_time(step: Callable[[], Any], layer: list[float], calls: int = 60) -> tuple[float, float]:
    """Microseconds until a step returns, from an idle device; and how many of them the graph layer took."""
    whole, inside = [], []
    for _ in range(calls):
        torch.cuda.synchronize()
        layer[0] = 0.0
        start = time.perf_counter()
        step()
        whole.append(time.perf_counter() - start)
        inside.append(layer[0])
    torch.cuda.synchronize()
    return statistics.median(whole) * 1e6, statistics.median(inside) * 1e6


def graph_layer(side: str) -> tuple[Any, str] | None:
    """Whose method the side calls for each launch, and to make a graph; None where it has no such layer."""
    if side in ("trees", "stock"):
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        return CUDAGraphTreeManager, "run"
    if side in RELAUNCH:
        from torch_overlay._inductor.relaunch.runner import Runner

        return Runner, "__call__"
    return None


def timed_layer(side: str) -> list[float]:
    """Seconds that calls of the graph layer take, added up in a cell: the outermost call of each."""
    cell = [0.0]
    depth = threading.local()
    if (layer := graph_layer(side)) is None:
        return cell
    owner, name = layer
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if getattr(depth, "on", False):
            return original(*args, **kwargs)
        depth.on = True
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            cell[0] += time.perf_counter() - start
            depth.on = False

    setattr(owner, name, timed)
    return cell


def device_used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextlib.contextmanager
def peak_of_device() -> Iterator[list[int]]:
    """The most memory that the device had in use, looked at every half millisecond."""
    peak, done = [device_used()], threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            peak[0] = max(peak[0], device_used())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], device_used())


def watched_captures(step: Callable[[], Any]) -> list[float]:
    """MiB of the device that making each of relaunch's graphs takes beyond the graph: at its peak, without what the
    executable keeps. They are made once more for that, since whoever watches the device delays what uses it."""
    from torch_overlay._inductor.relaunch import runners
    from torch_overlay._inductor.relaunch.region_graphs import RegionGraphs

    found: list[float] = []
    original = RegionGraphs.make

    def watched(*args: Any, **kwargs: Any) -> Any:
        before, reserved = device_used(), torch.cuda.memory_reserved()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with peak_of_device() as peak:
                result = original(*args, **kwargs)
        finally:
            sys.setswitchinterval(interval)
        kept = device_used() - before - (torch.cuda.memory_reserved() - reserved)
        found.append((peak[0] - before - kept) / MIB)
        return result

    runners.forget_all()
    settled()
    RegionGraphs.make = watched  # type: ignore[method-assign]
    try:
        for _ in range(3):
            step()
    finally:
        RegionGraphs.make = original  # type: ignore[method-assign]
    return found


def settled() -> int:
    """Bytes of the device in use, without garbage and free blocks."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return device_used()


def memory(base: int) -> dict[str, float]:
    """MiB of the allocator, and of the device beyond `base`."""
    return {
        "reserved MiB": torch.cuda.memory_reserved() / MIB,
        "peak MiB": torch.cuda.max_memory_allocated() / MIB,
        "device MiB": (device_used() - base) / MIB,
    }


def counters() -> dict[str, int]:
    """Of the overlay, and what its runner knows."""
    found = dict(torch._dynamo.utils.counters["torch_overlay"])
    stats = getattr(sys.modules.get("torch_overlay._inductor.relaunch.runners"), "stats", None)
    for name, value in (stats() if stats else {}).items():
        found.setdefault(f"cudagraph_{name}", value)
    return found


def limit_of_relaunch() -> dict[str, float]:
    """The overlay's own graphs, launched with the pointers that they have: no patches, no allocation, no checks."""
    replays = getattr(sys.modules.get("torch_overlay._inductor.relaunch.runners"), "bare_replays", None)
    functions = replays() if replays else []
    if not functions:
        return {}

    def launch() -> None:
        for replay in functions:
            replay()

    for _ in range(5):
        launch()
    return {"bare host us": host_time(launch, [0.0])[0], "bare gpu us": gpu_time(launch)}


def layer_and_bare(step: Callable[[], Any], layer: list[float], rounds: int = 9) -> tuple[float, float] | None:
    """Microseconds of the graph layer, and of bare launches where it stands, with the same work between them: what
    compiled code, guards and the interpreter leave in the host's caches is a large part of either. They take turns, for
    a host may be twice as fast a moment later. A bare launch leaves an earlier step's outputs. None if there is a
    region without a graph, or one with several."""
    from torch_overlay._inductor.relaunch.runner import Runner

    timed, outputs = Runner.__call__, {}

    def note(runner: Any, inputs: list[Any]) -> Any:
        outputs[runner] = result = timed(runner, inputs)
        return result

    def launch(runner: Any, inputs: list[Any]) -> Any:
        (state,) = runner.states.values()
        replay, result = state.relaunch.replay, outputs[runner]
        start = time.perf_counter()
        replay()
        layer[0] += time.perf_counter() - start
        inputs.clear()
        return result

    times: dict[Any, list[float]] = {timed: [], launch: []}
    try:
        Runner.__call__ = note  # type: ignore[method-assign]
        step()
        if any(len(r.states) != 1 or next(iter(r.states.values())).relaunch is None for r in outputs):
            return None
        for number in range(rounds):
            for call in (timed, launch) if number % 2 else (launch, timed):
                Runner.__call__ = call  # type: ignore[method-assign]
                times[call].append(host_time(step, layer, calls=12)[1])
        return statistics.median(times[timed]), statistics.median(times[launch])
    finally:
        Runner.__call__ = timed  # type: ignore[method-assign]


def measure(row: str, side: str, warm: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    base = settled()
    graphs = SIDES[side][1]
    layer = timed_layer(side)

    def compile(fn: Any) -> Any:
        return torch.compile(fn, mode="reduce-overhead" if graphs else None)

    work = ROWS[row][1](compile)
    no_grad = torch.no_grad() if work.optimizer is None else contextlib.nullcontext()
    gc.disable()
    with no_grad:
        start = time.perf_counter()
        work.step()
        torch.cuda.synchronize()
        first, warm_up = time.perf_counter() - start, layer[0]
        if warm:
            work.step()
            work.step()
            torch.cuda.synchronize()
            return {"first call s": first}
        before = settled()
        settling = []
        for i in range(5):
            if side == "replay" and i == 0:
                start = time.perf_counter()
                work.replay()
                settling.append(time.perf_counter() - start)
            start = time.perf_counter()
            work.step()
            torch.cuda.synchronize()
            settling.append(time.perf_counter() - start)
        result = {"first call s": first, "graph MiB": (settled() - before) / MIB}
        if graph_layer(side) is not None:
            result["warm up s"] = warm_up
        gc.enable()
        for _ in range(10):
            work.step()
        torch.cuda.reset_peak_memory_stats()
        start_counts = counters()
        steps = 50
        for _ in range(steps):
            work.step()
        torch.cuda.synchronize()
        counts = counters()
        result |= memory(base)
        result["gpu us"] = gpu_time(work.step)
        result["host us"], result["layer us"] = host_time(work.step, layer)
        result["queued us"] = queued_time(work.step, result["host us"])
        result["capture s"] = max(0.0, sum(settling) - 5 * max(result["gpu us"], result["host us"]) / 1e6)
        if side in RELAUNCH:
            for name in ("nodes_patched", "relaunches"):
                key = f"cudagraph_{name}"
                if key in counts:
                    result[name.replace("nodes_", "")] = (counts[key] - start_counts.get(key, 0)) / steps
            result["nodes"] = counts.get("cudagraph_nodes", 0)
            result["refusals"] = counts.get("cudagraph_refusals", 0)
            result |= limit_of_relaunch()
            if work.optimizer is None and (found := layer_and_bare(work.step, layer)) is not None:
                result["layer us"], result["bare layer us"] = found
            if made := watched_captures(work.step):
                result["capture MiB"] = max(made)
    if work.note:
        result["note"] = work.note
    return result


class Served:
    def __init__(self, row: str, side: str) -> None:
        self.row, self.side = row, side
        if os.environ.get("TORCH_OVERLAY_DISABLE") != "1":
            import torch_overlay  # noqa: F401

    def ready(self) -> dict[str, Any]:
        """The imports, which take longer than most measurements."""
        import torch._inductor.compile_fx  # noqa: F401

        if self.row.split()[0] in ("gpt2", "bert", "llama"):
            import transformers

            for name in ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"):
                getattr(transformers, name)
        return {}

    def warm(self) -> dict[str, Any]:
        return measure(self.row, self.side, warm=True)

    def measure(self) -> dict[str, Any]:
        return {"result": measure(self.row, self.side, warm=False)}


if __name__ == "__main__":
    import processes  # pyrefly: ignore[missing-import]

    processes.serve(lambda: Served(*sys.argv[2:]))
