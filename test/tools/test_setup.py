"""`tools/setup`: which Python it takes, what it installs, and that each of its refusals says what to do."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import unittest
from pathlib import Path

import form
import requirements


NO_NETWORK = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}


@form.overlay_only
class TestSetup(unittest.TestCase):
    """Each test works on a copy of tools/setup in a folder of its own, whose pins it writes."""

    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.root / "tools").mkdir()
        for name in ("setup", "requirements.py"):
            shutil.copy2(form.ROOT / "tools" / name, self.root / "tools" / name)
        self.pins("2.15.0", "")

    def pins(self, torch: str, demo: str) -> None:
        base = self.root / "torch_overlay" / "base.json"
        base.parent.mkdir(exist_ok=True)
        base.write_text(json.dumps({"torch": torch}))
        extras = f"[project.optional-dependencies]\ndemo = {[demo] if demo else []}\n"
        (self.root / "pyproject.toml").write_text(f"{extras}[dependency-groups]\ntest = []\n")

    def program(self, name: str, text: str) -> None:
        """Put a program in front of the PATH."""
        path = self.root / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def run_setup(self, extra: str = "demo", **env: str) -> subprocess.CompletedProcess[str]:
        unset = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PYTHONPATH")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment["PATH"] = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment |= {"PYTHON": sys.executable, **env}
        command = [str(self.root / "tools" / "setup"), extra]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def test_python_that_has_everything_is_used_as_it_is(self) -> None:
        result = self.run_setup()
        self.assertEqual((result.returncode, result.stdout), (0, f"{sys.executable}\n"), result.stderr)
        self.assertFalse((self.root / ".venv").exists())

    @form.slow
    def test_missing_package_is_installed_beside_the_torch_that_is_there(self) -> None:
        package = self.root / "index" / "overlaytestpackage"
        package.mkdir(parents=True)
        wheel = package / "overlaytestpackage-1.0-py3-none-any.whl"
        make_wheel(wheel)
        self.pins("2.15.0", "overlaytestpackage==1.0")
        local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(package), "PIP_CONFIG_FILE": os.devnull}
        result = self.run_setup(**local)
        self.assertEqual(result.returncode, 0, result.stderr)
        python = self.root / ".venv" / "bin" / "python"
        self.assertEqual(result.stdout, f"{python}\n")
        code = "import importlib.metadata as m; print(m.version('torch'), m.version('overlaytestpackage'))"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True)
        self.assertRegex(found.stdout, r"^2\.15\.0\S* 1\.0$")
        self.assertFalse(list((self.root / ".venv").glob("lib/python*/site-packages/torch")))
        again = self.run_setup(**NO_NETWORK)
        self.assertEqual((again.returncode, again.stdout), (0, f"{python}\n"), again.stderr)

    @form.slow
    def test_suite_of_a_clone_runs_with_a_python_that_has_torch_alone(self) -> None:
        """What its .venv has by ensurepip does not build the package."""
        clone, python = self.root / "clone", self.root / "alone" / "bin" / "python"
        subprocess.run(["git", "clone", "--quiet", form.ROOT, clone], check=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / "alone"], check=True)
        tests = [pin.partition("==")[0] for pin in requirements.pins(["test"]) if not pin.startswith("torch==")]
        hidden = {path.parts[0] for name in tests for path in importlib.metadata.files(name) or ()}
        (packages,) = (self.root / "alone").glob("lib/python*/site-packages")
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.name not in hidden and path.suffix != ".pth":
                (packages / path.name).symlink_to(path)
        command = [clone / "tools" / "test", "test/tools/test_package.py", "-k", "wheel"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("using the torch of", result.stderr)
        self.assertIn("1 passed", result.stdout)

    def test_wrong_python_is_refused_with_the_version_found(self) -> None:
        self.program("python3.9", "echo 3.9")
        result = self.run_setup(PYTHON=str(self.root / "bin" / "python3.9"))
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("is not Python 3.11 to 3.15 (it says: '3.9')", result.stderr)

    def test_no_fitting_python_on_the_path_says_what_to_install(self) -> None:
        for name in ("python", "python3", *(f"python3.{minor}" for minor in range(11, 16))):
            self.program(name, "echo 3.9")
        result = self.run_setup(PYTHON="")
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("Python 3.11 to 3.15 is needed; python3 here is '3.9'", result.stderr)
        self.assertIn("PYTHON=/path/to/python3.12", result.stderr)

    def test_tests_without_a_compiler_are_refused(self) -> None:
        for name in ("bash", "dirname", "uname"):
            self.program(name, f'exec {shutil.which(name)} "$@"')
        result = self.run_setup("test", PATH=str(self.root / "bin"))
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("no C or C++ compiler (looked for: g++)", result.stderr)

    @form.slow
    def test_full_disk_is_refused_before_anything_is_downloaded(self) -> None:
        self.program("df", "echo header; echo fs 100 99 524288 99% /")
        self.pins("2.15.1", "")
        result = self.run_setup(**NO_NETWORK)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("12 GB are needed, 0 GB are free", result.stderr)

    @form.slow
    def test_pip_tries_what_uv_could_not_install(self) -> None:
        self.pins("2.15.1", "")
        self.program("df", "echo header; echo fs 100 99 52428800 99% /")
        result = self.run_setup(**NO_NETWORK)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("uv could not install them; pip tries it", result.stderr)
        self.assertIn("pip could not install torch==2.15.1", result.stderr)

    @form.slow
    def test_no_network_is_said_and_a_second_run_goes_on(self) -> None:
        self.pins("2.15.0", "overlaytestpackage==1.0")
        for _ in range(2):
            result = self.run_setup(**NO_NETWORK)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn("pip could not install overlaytestpackage==1.0", result.stderr)
            self.assertIn("the network or the", result.stderr)

    @form.slow
    def test_python_of_another_version_gets_an_environment_of_its_own(self) -> None:
        self.pins("2.15.0", "overlaytestpackage==1.0")
        here = "{}.{}".format(*sys.version_info)
        self.program("../.venv/bin/python", "echo 3.16" if here == "3.15" else "echo 3.15")
        result = self.run_setup(**NO_NETWORK)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn(f"making .venv-{here} with Python {here}", result.stderr)
        self.assertTrue((self.root / f".venv-{here}" / "bin" / "python").exists())
        self.assertEqual(os.listdir(self.root / ".venv" / "bin"), ["python"])

    def test_broken_venv_is_named_and_not_touched(self) -> None:
        self.pins("2.15.0", "overlaytestpackage==1.0")
        (self.root / ".venv").mkdir()
        result = self.run_setup(**NO_NETWORK)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("Remove it.", result.stderr)
        self.assertEqual(list((self.root / ".venv").iterdir()), [])


def make_wheel(path: Path) -> None:
    import zipfile

    info = "overlaytestpackage-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("overlaytestpackage.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: overlaytestpackage\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class TestPins(unittest.TestCase):
    def test_every_requirement_is_pinned_to_one_version(self) -> None:
        for pin in requirements.pins(["demo", "test", "lint"]):
            self.assertRegex(pin, r"^[a-z0-9-]+==\d+(\.\d+)+$")

    def test_package_takes_patch_releases_of_the_torch_that_the_seams_were_written_for(self) -> None:
        base = json.loads((form.ROOT / "torch_overlay" / "base.json").read_text())["torch"]
        major, minor, _ = map(int, base.split("."))
        dependencies = tomllib.loads((form.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        self.assertEqual(dependencies, [f"torch>={base},<{major}.{minor + 1}"])
        self.assertEqual(requirements.pins([]), [f"torch=={base}"])

    def test_a_package_has_one_pin(self) -> None:
        config = tomllib.loads((form.ROOT / "pyproject.toml").read_text())
        names = [*config["project"]["optional-dependencies"], *config["dependency-groups"]]
        pinned = [pin.partition("==")[0] for pin in requirements.pins(names)]
        self.assertEqual(sorted(set(pinned)), sorted(pinned))

    def test_build_without_cuda_is_not_the_pinned_torch(self) -> None:
        from unittest import mock

        for version, there in (("2.15.0", True), ("2.15.0+cu132", True), ("2.15.0+cpu", False), ("2.15.1", False)):
            with mock.patch("importlib.metadata.version", return_value=version):
                self.assertEqual(requirements.is_there("torch==2.15.0"), there, version)
