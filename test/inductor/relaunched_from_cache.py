"""A process of the tests of caches: compiles programs for the host, with graphs on the device of `relaunch_device`, or
for a GPU.

`main(request)` writes, for each call of each program, how many graphs were captured and launched until then, and
whether its results were eager's, on the host bit by bit; and how often caches were asked. The request has `folder` and
`out`, and `load` or `save`, files of `torch.compiler`'s cache artifacts, and `device`, if that is no host.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from cached_simulation import lookups
from host_graphs import counted, host_graphs
from torch._dynamo.utils import counters


CALLS = 4


def training(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
    return torch.relu(x @ w).sum(0) * 2


def partitions(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
    return torch.erfinv(torch.tanh(x @ w) * 0.5).cos() @ w


def number(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
    return (x * w).cumsum(0) * n


def two_streams(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        a = torch.relu(x @ w)
    b = torch.tanh(w @ x)
    current.wait_stream(side)
    return a + b


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = list(zip(one, other, strict=True))
    if one[0].is_cuda:
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)
    return all(torch.equal(a, b) for a, b in pairs)


def run(fn: Any, grad: bool, device: str = "cpu", **how: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(fn, **how)
    graphs, equal = [], []
    for call in range(CALLS):
        given = [torch.randn(16, 16, requires_grad=grad, device=device) for _ in range(2)]
        results = []
        for function in (compiled, fn):
            y = function(*given, 3 + (call % 2 if "dynamic" in how else 0))
            grads = torch.autograd.grad(y.sum(), given) if grad else ()
            results.append([y.detach(), *grads])
        graphs.append(counted())
        equal.append(same(*results))
    return {"graphs": graphs, "equal": equal, "lookups": lookups()}


def main(request: dict[str, Any]) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = request["folder"]
    torch.manual_seed(0)
    if "load" in request:
        torch.compiler.load_cache_artifacts(Path(request["load"]).read_bytes())
    device = request.get("device", "cpu")
    graphs = host_graphs() if device == "cpu" else inductor_config.patch({"triton.cudagraphs": True})
    with graphs:
        found = {"training": run(training, True, device)}
        with inductor_config.patch(custom_should_partition_ops=["aten::erfinv"]):
            found["partitions"] = run(partitions, False, device)
        found["number"] = run(number, False, device, dynamic=True)
        if device != "cpu":
            found["two streams"] = run(two_streams, True, device)
            with inductor_config.patch({"triton.cudagraphs": False}):
                found["two streams without graphs"] = run(two_streams, True, device)
    if "save" in request:
        artifacts: Any = torch.compiler.save_cache_artifacts()
        Path(request["save"]).write_bytes(artifacts[0])
    Path(request["out"]).write_text(json.dumps(found))
