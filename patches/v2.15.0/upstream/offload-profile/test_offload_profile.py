# Owner(s): ["module: aotdispatch"]

import json
import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._functorch._activation_offloading import profile_cache
from torch._functorch._activation_offloading.profile_cache import locked, profile
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests, TestCase


def described(name="NVIDIA H200", count=132, uuid="GPU-1234"):
    return SimpleNamespace(name=name, multi_processor_count=count, uuid=uuid)


class Counted:
    """Measures by counting."""

    def __init__(self, **found):
        self.found, self.asked = found, []

    def __call__(self, names):
        self.asked.append(names)
        return {n: self.found[n] for n in names if n in self.found}


class TestProfile(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.device, self.driver = described(), "580.1"
        for patch in (
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder.name),
            mock.patch.object(
                torch.cuda, "get_device_properties", lambda index: self.device
            ),
            mock.patch.object(profile_cache, "_driver_version", lambda: self.driver),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(profile_cache.forget)

    def files(self):
        return sorted((self.folder / profile_cache.FOLDER).glob("*.json"))

    def ask(self, measure, *names):
        """As a new process does."""
        profile_cache.forget()
        return profile(0).get(list(names), measure)

    def test_each_number_is_measured_once_by_all_processes(self):
        measure = Counted(a=1.5, b=2.5, c=3.5)
        self.assertEqual(self.ask(measure, "a", "b"), {"a": 1.5, "b": 2.5})
        self.assertEqual(self.ask(measure, "b", "c"), {"b": 2.5, "c": 3.5})
        every = {"a": 1.5, "b": 2.5, "c": 3.5}
        self.assertEqual(self.ask(measure, *every), every)
        self.assertEqual(measure.asked, [["a", "b"], ["c"]])
        (file,) = self.files()
        about = json.loads(file.read_text())["about"]
        self.assertEqual(
            (about["driver"], about["torch"]), ("580.1", torch.__version__)
        )

    def test_process_remembers_what_it_has_read(self):
        measure = Counted(a=1.5)
        self.ask(measure, "a")
        (file,) = self.files()
        file.unlink()
        self.assertEqual(profile(0).get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [["a"]])

    def test_another_device_or_version_is_measured_anew(self):
        measure = Counted(a=1.5)
        self.ask(measure, "a")
        self.device = described("NVIDIA H100")
        self.ask(measure, "a")
        self.device = described("NVIDIA H100", 114)
        self.ask(measure, "a")
        self.driver = "590.1"
        self.ask(measure, "a")
        for owner, name in ((torch, "__version__"), (torch.version, "cuda")):
            with mock.patch.object(owner, name, "another"):
                self.ask(measure, "a")
        self.assertEqual((len(measure.asked), len(self.files())), (6, 6))

    def test_another_device_of_the_kind_is_not(self):
        measure = Counted(a=1.5)
        self.ask(measure, "a")
        self.device = described(uuid="GPU-5678")
        self.ask(measure, "a")
        self.assertEqual(measure.asked, [["a"]])

    def test_what_was_not_measured_is_asked_for_again(self):
        measure = Counted(a=1.5)
        for _ in range(2):
            self.assertEqual(self.ask(measure, "a", "too large"), {"a": 1.5})
        self.assertEqual(measure.asked, [["a", "too large"], ["too large"]])

    def test_broken_files_are_as_good_as_none(self):
        measure = Counted(a=1.5)
        self.ask(measure, "a")
        (file,) = self.files()
        good = json.loads(file.read_text())
        deep = "[" * 100_000 + "]" * 100_000
        broken = [-1, 0, 10**400, float("inf"), True, "1.5", None]
        for text in (
            *("", "[]", "{}", deep, "\xff", "[" + "9" * 5000 + "]"),
            json.dumps(good).replace("1.5", deep),
            *(json.dumps({**good, "measured": {"a": value}}) for value in broken),
            json.dumps({**good, "about": {}}),
            json.dumps({**good, "measured": [1.5]}),
        ):
            file.write_text(text, encoding="latin-1")
            measure.asked.clear()
            self.assertEqual(self.ask(measure, "a"), {"a": 1.5})
            self.assertEqual(measure.asked, [["a"]])

    def test_numbers_that_are_no_times_are_not_kept(self):
        measure = Counted(z=float("nan"), y=10**400, x=-1.0, a=1.5)
        self.assertEqual(self.ask(measure, *"zyxa"), {"a": 1.5})
        (file,) = self.files()
        self.assertEqual(json.loads(file.read_text())["measured"], {"a": 1.5})

    def test_measurement_that_raises(self):
        def measure(names):
            raise RuntimeError("out of memory")

        with self.assertRaisesRegex(RuntimeError, "out of memory"):
            self.ask(measure, "a")
        self.assertEqual(self.ask(Counted(a=1.5), "a"), {"a": 1.5})

    def test_folder_that_can_not_be_written(self):
        (self.folder / profile_cache.FOLDER).write_text("in the way")
        measure = Counted(a=1.5)
        profile_cache.forget()
        for _ in range(2):
            self.assertEqual(profile(0).get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [["a"]])

    def test_file_that_can_not_be_replaced(self):
        def replace(source, target):
            raise OSError("read-only")

        with mock.patch.object(os, "replace", replace):
            self.assertEqual(self.ask(Counted(a=1.5), "a"), {"a": 1.5})
        self.assertEqual(list(self.folder.rglob("*.tmp")), [])
        self.assertEqual(self.files(), [])

    def test_disabled_caches(self):
        with config.patch(force_disable_caches=True):
            self.assertEqual(self.ask(Counted(a=1.5), "a"), {"a": 1.5})
        self.assertEqual(list(self.folder.rglob("*.*")), [])

    def test_device_that_is_being_measured(self):
        """A lock is that of a file that was opened, as in another process."""
        measure = Counted(a=1.5)
        with locked(0) as first, locked(0, patience=0.1) as second:
            self.assertEqual((first, second), (True, False))
            with mock.patch.object(profile_cache, "PATIENCE", 0.1):
                self.assertEqual(self.ask(measure, "a"), {})
            self.device = described(uuid="GPU-5678")
            with locked(0, patience=0.1) as third:
                self.assertTrue(third)
        self.assertEqual(measure.asked, [])
        self.assertEqual(self.ask(measure, "a"), {"a": 1.5})

    def test_lock_is_waited_for(self):
        taken, release = threading.Event(), threading.Event()

        def hold():
            with locked(0):
                taken.set()
                release.wait()

        other = threading.Thread(target=hold)
        other.start()
        taken.wait()
        threading.Timer(0.2, release.set).start()
        with locked(0, patience=60) as alone:
            self.assertTrue(alone and release.is_set())
        other.join()

    def test_what_another_process_measured_meanwhile(self):
        here = profile(0)
        self.ask(Counted(a=1.5), "a")
        measure = Counted(a=9.0)
        self.assertEqual(here.get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [])


if __name__ == "__main__":
    run_tests()
