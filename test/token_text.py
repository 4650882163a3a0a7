"""Tokens from their printed form: `tokens("s0", "e5.0")`."""

from torch_overlay._functorch.streams.tokens import Token


def token(text: str) -> Token:
    kind, (index, _, nth) = text[0], text[1:].partition(".")
    return Token(kind, int(index), int(nth or -1))  # type: ignore[arg-type]


def tokens(*texts: str) -> frozenset[Token]:
    return frozenset(map(token, texts))
