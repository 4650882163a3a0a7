"""One rank of a program of several: python -m relaunch_programs._rank NAME SETTINGS, with torchrun's variables set."""

import json
import os
import sys

import torch
import torch.distributed as dist

import form  # noqa: F401
from relaunch_programs import by_name
from relaunch_programs._check import check, Settings, summary


def main(name: str, settings: Settings) -> None:
    rank = os.environ["RANK"]
    if settings.device == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    try:
        check(by_name(name), settings)
        dist.barrier()
        report(name, rank)
    except Exception as e:
        report(name, rank)
        print(f"{type(e).__name__}: {' '.join(str(e).split())}", flush=True)
        # The other ranks wait in a collective: there is no orderly way out.
        os._exit(1)
    if settings.device == "cpu":
        os._exit(0)  # on a busy machine the end of gloo's threads is now and then an abort
    dist.destroy_process_group()


def report(name: str, rank: str) -> None:
    for line in summary():
        print(f"{name}, rank {rank}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Settings(**json.loads(sys.argv[2])))
