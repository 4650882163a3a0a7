"""Training under DDP and FSDP2, in two processes on the host: what is compiled, and relaunched on the stand-in device,
learns the same as what stock PyTorch compiles, bit by bit.
"""

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from data_parallel_rank import CASES, RANKS, STEPS
from torch._dynamo.test_case import TestCase

import form


@form.slow
@form.overlay_only
class TestDataParallel(TestCase):
    def ranks(self) -> list[dict[str, Any]]:
        """The answers of `data_parallel_rank`, of both ranks."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        done: dict[int, Any] = {}

        def run(rank: int) -> None:
            request = {"rank": rank, "rendezvous": str(folder / "store"), "out": str(folder / f"{rank}")}
            code = (
                f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom data_parallel_rank import main\n"
            )
            env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache {rank}")}
            done[rank] = form.run_python(f"{code}main({ {**request, 'cases': [*CASES]}!r})", env=env)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(RANKS):
            self.assertEqual(done[rank].returncode, 0, done[rank].stderr[-3000:])
        return [json.loads((folder / f"{rank}").read_text()) for rank in range(RANKS)]

    def test_learns_what_stock_learns(self) -> None:
        ranks = self.ranks()
        for case in CASES:
            with self.subTest(case):
                for rank in ranks:
                    eager, stock, graphs = (rank[case][side] for side in ("eager", "stock", "graphs"))
                    self.assertEqual(graphs["losses"], stock["losses"])
                    self.assertEqual(graphs["parameters"], stock["parameters"])
                    self.assertEqual(stock["graphs"], [[0, 0]] * STEPS)
                    (third, _), (captures, launches) = graphs["graphs"][2], graphs["graphs"][-1]
                    self.assertGreater(launches, STEPS)
                    if not (CASES[case].compiled_step or CASES[case].resume):
                        self.assertEqual(captures, third)  # FSDP2 moves all parameters in each step
                    for ours, theirs in zip(graphs["losses"], eager["losses"], strict=True):
                        self.assertAlmostEqual(ours, theirs, delta=2e-2 * theirs)
                    self.assertNotEqual(eager["losses"][0], eager["losses"][-1])
                self.assertEqual(*(rank[case]["graphs"]["parameters"] for rank in ranks))
