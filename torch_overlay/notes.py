"""Typed notes on objects of upstream's: one record for each kind of object, the only attribute of ours there.

They are an attribute and no entry of a weak dictionary, because notes may name what names the object, as those on a
schedule name its nodes: only the garbage collector can free them together. Notes on what upstream keeps in its caches
are pickled with it.
"""

from __future__ import annotations

from typing import Any, Self


class Notes:
    """The base of the records. `of` is for those whose fields have defaults."""

    def put(self, noted: Any) -> None:
        noted.overlay_notes = self

    @classmethod
    def find(cls, noted: Any) -> Self | None:
        """Return the notes on an object; None if there are none."""
        return getattr(noted, "overlay_notes", None)

    @classmethod
    def of(cls, noted: Any) -> Self:
        """Return the notes on an object, which has some from now on."""
        found = cls.find(noted)
        if found is None:
            (found := cls()).put(noted)
        return found
