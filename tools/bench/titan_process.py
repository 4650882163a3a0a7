"""One rank of a side of the benchmark of training at scale; torchrun starts it for titan.py.

    titan_process.py ROW SIDE FOLDER        a row in JSON, a side of `SIDES`; writes FOLDER/rankN.json

The first steps are made one by one and their losses kept; then steps are timed many in a row, without losses, which
would wait for the device; the loss of one more step says whether those were right, too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from titan_config import config, import_torchtitan, Row  # noqa: E402  # pyrefly: ignore[missing-import]


# side -> side of relaunch_process, which has the environment; graphs for each block?; torchtitan's own graph?
SIDES = {
    "none": ("stock", False, False),
    "relaunch": ("relaunch", True, False),
    "titan": ("stock", False, True),
    "trees": ("stock", True, False),
}
FIRST = 10  # steps that are watched one by one
ROUNDS = 3  # of so many steps as the row says
ALONE = 5  # steps that begin with an idle device, for the host's time


class Training:
    """A trainer of torchtitan's, a step at a time."""

    def __init__(self, row: Row, side: str, folder: str) -> None:
        _, graphs, whole = SIDES[side]
        self.row = row
        self.trainer = config(row, whole, self.all_steps(row), folder).build()
        if graphs:
            self._compile_blocks("reduce-overhead")
        if row.device == "cpu":
            self._sum_gradients()
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    @staticmethod
    def all_steps(row: Row) -> int:
        return FIRST + ROUNDS * row.steps + ALONE + 1

    def _compile_blocks(self, mode: str) -> None:
        """Compile again what torchtitan compiles, in another mode: nothing has run yet."""
        for part in self.trainer.model_parts:
            for block in part.layers.values():
                block.compile(mode=mode, fullgraph=True)

    def _sum_gradients(self) -> None:
        """Have FSDP2 scale gradients itself: gloo doesn't."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

    def step(self, keep_loss: bool) -> None:
        trainer = self.trainer
        trainer.metrics_processor.on = keep_loss
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(self.batches)

    def synchronize(self) -> None:
        if self.row.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def timed(self, steps: int, keep_loss: bool) -> tuple[float, float]:
        """Milliseconds until the last of some steps has returned, and until the device is done, from idle."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(keep_loss)
        returned = time.perf_counter()
        self.synchronize()
        return (returned - start) * 1e3, (time.perf_counter() - start) * 1e3


def watch_captures() -> Counter[str]:
    """Count the CUDA graphs that torch captures from now on, and their nodes. Empty graphs, which hold a memory pool,
    don't count."""
    import torch

    from torch_overlay._inductor.relaunch.graph.driver import Driver

    seen, reader = Counter(captures=0, nodes=0), Driver()

    def note(graph: torch.cuda.CUDAGraph) -> None:
        if nodes := len(reader.nodes(graph.raw_cuda_graph())):
            seen.update(captures=1, nodes=nodes)

    torch.cuda.graphs.register_graph_capture_end_hook(note)
    return seen


def _graphs(side: str, captured: Counter[str]) -> dict[str, Any]:
    """Counts of the graphs: captures, their nodes, and refusals with the first reasons."""
    from relaunch_process import counters  # pyrefly: ignore[missing-import]
    from torch._dynamo.utils import counters as dynamo

    if side != "relaunch":
        return {**captured, "refusals": dynamo["inductor"].get("cudagraph_skips", 0)}
    from torch_overlay._inductor.relaunch.causes import refusals

    found = counters()
    numbers = {name: found.get(f"cudagraph_{name}", 0) for name in ("captures", "nodes", "refusals")}
    return numbers | {"reasons": refusals()[:3]}


def measure(row: Row, side: str, folder: str) -> dict[str, Any]:
    """Train, in this process and rank of its group. Raises whatever a step raises."""
    import torch
    from relaunch_process import memory, settled  # pyrefly: ignore[missing-import]

    on_gpu, base, captured = row.device == "cuda", 0, Counter[str]()
    torch._inductor.config.deterministic = row.deterministic
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.zeros(1, device="cuda")
        base = settled()
        if side != "relaunch":  # whose counters tell apart what is captured to prove a graph
            captured = watch_captures()
    training = Training(row, side, folder)
    first = [training.timed(1, keep_loss=True)[1] for _ in range(FIRST)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = [training.timed(row.steps, keep_loss=False)[1] / row.steps for _ in range(ROUNDS)]
    host = [training.timed(1, keep_loss=False)[0] for _ in range(ALONE)]
    used = memory(base) if on_gpu else {}
    training.step(keep_loss=True)
    kept = training.trainer.metrics_processor
    times = {
        "first ms": first[:5],
        "ms": statistics.median(steps),
        "each ms": steps,
        "host ms": statistics.median(host),
    }
    return times | used | _graphs(side, captured) | {"losses": kept.losses, "norms": kept.norms}


def keep(folder: str, rank: str, answer: dict[str, Any]) -> None:
    """Write the answer of a rank. The file has its name once it is whole, for torchrun may end this process at any
    time."""
    part = Path(folder, f"rank{rank}.part")
    part.write_text(json.dumps(answer))
    part.replace(part.with_suffix(".json"))


def main(row: Row, side: str, folder: str) -> None:
    answer: dict[str, Any]
    try:
        import torch_overlay  # noqa: F401

        import_torchtitan(row.device)
        answer = measure(row, side, folder)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], "at": time.time()}
    keep(folder, os.environ["RANK"], answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in answer else 0)  # other ranks may wait in a collective


if __name__ == "__main__":
    main(Row(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3])
