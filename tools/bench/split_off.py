#!/usr/bin/env python3
"""Measures what an operator outside of CUDA graphs costs a model: Llama with one that waits between its two halves.

    python tools/bench/split_off.py [--rounds 1] [--jsonl FILE]

The model without the operator and with it take turns. Prints the largest difference of each from eager, and a line for
each turn: us a call (median of 60 calls, each until the device is done) and the part of kernel launches in graphs; and
last, the time with the operator against the sum of the time without it and the operator's own: called again and again,
and called after the model, when the processor's caches hold what a call of the model has left. --jsonl FILE, with
--rounds 3, writes what tools/bench/gate.py compares, with the former.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import relaunch_rows  # noqa: E402  # pyrefly: ignore[missing-import]
import stream_rows  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]

import torch_overlay  # noqa: E402


DEVICE = "cuda"
NAMES = {False: "without it", True: "with the operator"}


@torch.library.custom_op("split_off::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().synchronize()
    return x.clone()


waits.register_fake(torch.empty_like)


def main() -> None:
    import transformers as hf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=records.positive, default=1, help="rounds, each of two turns with the operator and without"
    )
    records.add_option(parser)
    args = parser.parse_args()
    config = relaunch_rows.llama_config()
    with torch.device(DEVICE):
        model = hf.LlamaForCausalLM(config).bfloat16().eval()
    layer = model.model.layers[8]
    forward, between = layer.forward, [False]
    layer.forward = lambda x, *args, **kwargs: forward(waits(x) if between[0] else x, *args, **kwargs)
    ids = torch.randint(0, config.vocab_size, (1, 64), device=DEVICE)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids).logits

    us: dict[bool, list[float]] = {False: [], True: []}
    outside: list[float] = []
    compiled = torch.compile(run, mode="reduce-overhead")
    with torch.no_grad():
        for between[0] in (False, True):
            expected = run(ids)
            for _ in range(8):
                found = compiled(ids)
            off = (found.float() - expected.float()).abs().max().item()
            print(f"{NAMES[between[0]]:18} off by {off:.3f}", flush=True)
        for between[0] in (False, True, True, False) * args.rounds:
            before = torch_overlay.coverage()
            us[between[0]].append(stream_rows.call_time(lambda: compiled(ids), 60, warmup=3))
            share = torch_overlay.coverage().since(before).share
            outside += [100 * (1 - share)] if between[0] else []
            print(f"{NAMES[between[0]]:18} {us[between[0]][-1]:8.1f} us, {100 * share:.2f} % in graphs", flush=True)
        x = torch.randn(1, 64, config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        alone = stream_rows.call_time(lambda: waits(x), 200, warmup=0)
        between[0] = False
        after = stream_rows.call_time(lambda: waits(x), 60, warmup=0, before=lambda: compiled(ids))
    ratio, ratio_after = (min(us[True]) / (min(us[False]) + own) for own in (alone, after))
    print(f"operator alone {alone:.1f} us: ratio {ratio:.3f}; after the model {after:.1f} us: ratio {ratio_after:.3f}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found = {
        "wall time": {"with the operator / both alone": records.ratios(us[True], [t + alone for t in us[False]])},
        "count": {"launches outside of graphs, %": outside},
    }
    records.write(args.jsonl, streams.describe(), {"split_off": {"llama": found}})


if __name__ == "__main__":
    main()
