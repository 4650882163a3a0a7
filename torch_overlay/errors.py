"""Defines the one exception of the overlay engine. Its reason code is stable: programs and tests may compare it."""

from __future__ import annotations


REASONS = {
    "wrong_version": "the installed PyTorch is not the release that this overlay was written for",
    "broken_package": "a file of the overlay itself cannot be read",
    "already_patched": "this PyTorch tree has the patch series applied",
    "installed_twice": "another copy of torch_overlay is enabled in this process",
    "missing_target": "an upstream name that a seam needs does not exist",
    "source_changed": "the code of a seam's target is not the code that the seam was written against",
    "wrapped_over": "another library has replaced one of the overlay's hooks with its own function",
    "torch_is_importing": "a module that a seam needs is still being imported",
    "import_failed": "a module that a seam needs can't be imported",
    "taken_out": "another library has taken a hook of the overlay's out",
    "bad_registration": "a registration did not return the callable that undoes it",
}


class OverlayError(RuntimeError):
    """Raised if the overlay could not be installed or removed, and nothing was changed, or if it was changed from
    outside, and is disabled.

    Attributes:
        reason: a key of REASONS
        target: the module or object concerned, for example "torch._inductor.scheduler:Scheduler.can_fuse"
        expected, found: what the overlay needs and what is there
    """

    def __init__(self, reason: str, target: str, expected: str, found: str, remedy: str) -> None:
        self.reason = reason
        self.target = target
        self.expected = expected
        self.found = found
        self.remedy = remedy
        outcome = "torch_overlay is disabled" if reason == "taken_out" else "nothing was changed"
        super().__init__(
            f"torch_overlay [{reason}] {target}: {REASONS[reason]}.\n"
            f"  expected: {expected}\n"
            f"  found:    {found}\n"
            f"  {outcome}. {remedy}"
        )

    def __reduce__(self) -> tuple[type[OverlayError], tuple[str, ...]]:
        return type(self), (self.reason, self.target, self.expected, self.found, self.remedy)
