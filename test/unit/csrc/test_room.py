"""Tests of parts of one memory: `csrc/room.c`."""

import ctypes
import os
import random
import subprocess
import tempfile
import unittest
from pathlib import Path

import torch_overlay.csrc


SOURCE = Path(torch_overlay.csrc.__file__).parent / "room.c"
PART = 512


class Hole(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_size_t), ("end", ctypes.c_size_t)]


class Room(ctypes.Structure):
    _fields_ = [("hole", Hole * 64), ("holes", ctypes.c_int)]


class TestRoom(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "room.so"
            subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-o", library, SOURCE], check=True)
            cls.library = ctypes.CDLL(str(library))

    def test_parts_never_overlap_and_come_back(self):
        for seed in range(40):
            draw, room, held = random.Random(seed), Room(), []
            units = draw.randrange(1, 200)
            self.library.open_room(ctypes.byref(room), ctypes.c_size_t(units * PART))
            free = [True] * units
            for _ in range(300):
                part, bytes = Hole(), draw.randrange(1, 20_000)
                if held and draw.random() < 0.5:
                    part = held.pop(draw.randrange(len(held)))
                    self.library.give_part(ctypes.byref(room), part)
                elif self.library.take_part(ctypes.byref(room), ctypes.c_size_t(bytes), ctypes.byref(part)):
                    self.assertGreaterEqual(part.end - part.begin, bytes)
                    self.assertTrue(all(free[part.begin // PART : part.end // PART]))
                    held.append(part)
                else:  # no hole is large enough
                    runs = "".join("-" if each else "x" for each in free).split("x")
                    self.assertLess(max(map(len, runs)) * PART, bytes)
                    continue
                is_free = all(part is not each for each in held)
                free[part.begin // PART : part.end // PART] = [is_free] * ((part.end - part.begin) // PART)
            for part in held:
                self.library.give_part(ctypes.byref(room), part)
            whole = room.hole[0]
            self.assertEqual((room.holes, whole.begin, whole.end), (1, 0, units * PART))


if __name__ == "__main__":
    unittest.main()
