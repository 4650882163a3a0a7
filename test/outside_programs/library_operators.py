"""Operators of torch that call libraries, or the host, in ways that a capture may not allow."""

from typing import Any

import torch

from outside_programs._program import program


def between_products(name: str, run: Any, *causes: str) -> None:
    """A program that calls the operator between two products; each cause is "CODE OPERATOR"."""

    def body(x: Any, w: Any) -> Any:
        y = x @ w
        z = run(y)
        return (y @ w).cos(), z

    body.__name__ = name
    program(causes=causes, compiled_at_once=False)(body)


def positive(y: Any) -> Any:
    return y @ y.T + torch.eye(y.size(0), device=y.device)


CHECKED = "split-devices aten::_linalg_check_errors.default"


def ctc(y: Any) -> Any:
    targets = torch.ones(2, 3, dtype=torch.long, device="cuda")
    logs = y.log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
    return torch.nn.functional.ctc_loss(logs, targets, torch.tensor([128, 128]), torch.tensor([3, 3]))


for name, run, *causes in (
    ("cholesky", lambda y: torch.linalg.cholesky(positive(y)), CHECKED),
    ("inverse", lambda y: torch.linalg.inv(positive(y)), CHECKED),
    ("solve", lambda y: torch.linalg.solve(positive(y), y), CHECKED),
    ("qr", lambda y: torch.linalg.qr(y).R.abs()),
    ("svd", lambda y: torch.linalg.svdvals(y), "split-failed aten::_linalg_svd.default"),
    ("eigenvalues", lambda y: torch.linalg.eigvalsh(positive(y)), "split-unsafe aten::_linalg_eigh.default"),
    (
        "lu",
        lambda y: torch.linalg.lu_factor(positive(y))[0],
        "split-devices aten::_linalg_check_errors.default",
        "split-failed",
    ),
    ("determinant", lambda y: torch.linalg.det(y), "split-failed"),
    ("histogram", lambda y: torch.histc(y, 8, -1, 1)),
    ("counts", lambda y: torch.bincount((y * 10).abs().int().flatten(), minlength=64), "graph-break"),
    ("multinomial", lambda y: torch.multinomial(y.softmax(-1), 1).sum() * 0),
    ("sorted", lambda y: y.sort().values),
    ("fourier", lambda y: torch.fft.fft(y).real),
    ("complex", lambda y: torch.complex(y, y).abs()),
    ("cross_entropy", lambda y: torch.nn.functional.cross_entropy(y, y.argmax(-1))),
    ("ctc_loss", ctc, "split-host", "graph-break"),
    ("embedding_bag", lambda y: torch.nn.functional.embedding_bag((y[:4].abs() * 9).long() % 16, y[:16])),
    ("unique_consecutive", lambda y: y.median(-1).values.mode(0).values),
    ("cdist", lambda y: torch.cdist(y, y)),
    ("dropout", lambda y: torch.nn.functional.dropout(y, 0.5).sum() * 0),
    ("interpolate", lambda y: torch.nn.functional.interpolate(y[None, None], scale_factor=2.0, mode="bicubic")),
    ("lstm_cell", lambda y: torch.nn.functional.gelu(y).cumsum(0)),
    ("tensor_of_a_list", lambda y: y[0, :4] * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")),
    ("index_on_the_host", lambda y: y[torch.tensor([1, 5, 3])]),  # rewritten
):
    between_products(name, run, *causes)
