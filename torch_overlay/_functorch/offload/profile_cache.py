"""Keeps on disk what has been measured on a device: a measurement is made once, by one process at a time.

A profile is a JSON file in Inductor's cache directory, one for each kind of device, version of its driver, and version
of torch and CUDA, with numbers by name (`device_rates`, `kernel_times`). The processes of a machine share it: a process
that needs a missing number takes the device's lock, looks again, measures, and replaces the file atomically. A file
that can't be read counts as missing; if it can't be written, the next process measures again. Nothing is read or
written under `torch._inductor.config.force_disable_caches`.

The lock is a file, too, one for each single device: it keeps measurements of different processes from overlapping. A
benchmark that wants the device for itself can take the lock (`locked`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

FOLDER = "device_profiles"
PATIENCE = 120.0  # seconds to wait for another process that measures


def about(device_index: int) -> dict[str, str]:
    """Return the kind of device and the versions that a measurement is valid for."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    return {
        "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def _driver_version() -> str:
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        return file.readline().strip()
    return str(getattr(torch._C, "_cuda_getDriverVersion", int)())


def folder() -> Path | None:
    """Return the folder of the profiles; None where caches are off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return None if config.force_disable_caches else Path(cache_dir()) / FOLDER


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def locked(device_index: int, patience: float | None = None) -> Iterator[bool]:
    """Take the device's lock, so that one process at a time measures; yield False if it was not free in time."""
    where = folder()
    if where is None:
        yield True
        return
    name = str(getattr(torch.cuda.get_device_properties(device_index), "uuid", device_index))
    try:
        where.mkdir(parents=True, exist_ok=True)
        file = open(where / f"{_digest(name)}.lock", "w")  # noqa: SIM115
    except OSError as error:
        log.info("measurements of several processes may disturb one another: %s", error)
        yield True
        return
    with file:
        yield _taken(file, time.monotonic() + (PATIENCE if patience is None else patience))


def _taken(file: Any, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        except OSError as error:  # a file system without locks
            log.info("measurements of several processes may disturb one another: %s", error)
            return True


class Profile:
    """Measured numbers by name, for one kind of device. A measurement takes the lock of `device_index`."""

    def __init__(self, device_index: int, path: Path | None, described: dict[str, str]) -> None:
        self.device_index, self.path, self.about = device_index, path, described
        self.known: dict[str, float] = {}
        self.read()

    def read(self) -> None:
        if self.path is None:
            return
        try:
            found = json.loads(self.path.read_text())
            if found["about"] == self.about:
                self.known |= {k: float(v) for k, v in found["measured"].items() if _is_time(v)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.info("the profile %s is not read: %s", self.path, error)

    def write(self) -> None:
        if self.path is None:
            return
        text = json.dumps({"about": self.about, "measured": self.known}, indent=1, sort_keys=True)
        temporary = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            log.info("the profile %s is not written: %s", self.path, error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def get(self, names: list[str], measure: Callable[[list[str]], dict[str, float]]) -> dict[str, float]:
        """Return the numbers that are known of `names`. `measure` is called with the names that no process has
        measured, while the device is locked; it may return fewer than it was asked for, or raise."""
        if missing := [n for n in names if n not in self.known]:
            with locked(self.device_index) as alone:
                self.read()
                missing = [n for n in missing if n not in self.known]
                if missing and alone:
                    found = {k: float(v) for k, v in measure(missing).items() if _is_time(v)}
                    self.known |= found
                    if found:
                        self.write()
        return {n: self.known[n] for n in names if n in self.known}


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


@functools.cache
def _profile(device_index: int, path: Path | None) -> Profile:
    return Profile(device_index, path, about(device_index))


def profile(device_index: int) -> Profile:
    """Return the profile of a device. Raise RuntimeError where there is no device."""
    described = about(device_index)
    where = folder()
    return _profile(device_index, where / f"{_digest(described)}.json" if where is not None else None)


def forget() -> None:
    """Drop the profiles that this process has read; the files remain."""
    _profile.cache_clear()
