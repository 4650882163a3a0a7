"""Faults at every step of tools/apply_patches.py: kills, errors, and several runs at once.

    python test/tools/patch_faults.py kill          SIGKILL before each file-system operation, in both directions
    python test/tools/patch_faults.py errors        a full disk and a read-only one, from each operation on or once
    python test/tools/patch_faults.py races         two runs at once, in all pairings

An operation is an audit event of Python's that changes something, a lock, or an fsync. Each run is a fork of this
process, which has neither torch nor threads. After every fault the tree must be whole, or `--check` must say that it is
not, and the next run, in either direction, must leave the tree that it was asked for and nothing else.
"""

import argparse
import collections
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import apply_patches  # noqa: E402
import series  # noqa: E402


Tree = dict[str, Any]
EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.utime", "os.truncate"}
ALLOCATING = {"open", "os.mkdir", "os.link", "fsync"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
APPLY, REVERSE = (), ("--reverse",)


class Operations:
    """Calls `fault(count, kind)` before each operation of this process that changes files."""

    def __init__(self, fault: Callable[[int, str], None]) -> None:
        self.count = 0
        self.fault = fault
        sys.addaudithook(self.audit)
        os.fsync = lambda descriptor: self.step("fsync")

    def step(self, kind: str) -> None:
        self.count += 1
        self.fault(self.count, kind)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS or event == "fcntl.flock" or (event == "open" and arguments[2] & WRITES):
            self.step(event)


class Result:
    def __init__(self, status: int, output: str) -> None:
        self.killed = os.WIFSIGNALED(status)
        self.status = os.waitstatus_to_exitcode(status)
        self.output = output


def run(root: Path, *options: str, fault: Callable[[int, str], None] | None = None) -> Result:
    """Runs the tool in a child, with a fault."""
    with tempfile.TemporaryFile(dir=root.parent) as output:
        child = os.fork()
        if child == 0:
            try:
                sys.stdout = sys.stderr = io.TextIOWrapper(output, "utf-8")
                os.fsync = lambda descriptor: None
                if fault is not None:
                    Operations(fault)
                status = apply_patches.main([*options, str(root)])
                sys.stdout.flush()
            except BaseException as error:
                os.write(output.fileno(), repr(error).encode())
                status = 99
            os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Result(status, output.read().decode())


def kill_at(position: int) -> Callable[[int, str], None]:
    def fault(count: int, kind: str) -> None:
        if count == position:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def fail(position: int, code: int, kinds: set[str] | None, once: bool) -> Callable[[int, str], None]:
    def fault(count: int, kind: str) -> None:
        if (count == position if once else count >= position) and (kinds is None or kind in kinds):
            raise OSError(code, os.strerror(code))

    return fault


def snapshot(root: Path) -> Tree:
    """Every file below a folder with its permissions, every folder, every link."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes(), path.stat().st_mode)
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


def files(tree: Tree) -> Tree:
    """The files and links of a snapshot, without those of a run that was killed."""
    return {name: entry for name, entry in tree.items() if entry is not None and apply_patches.STAGING not in name}


def make_small(folder: Path) -> None:
    """A tree, a series of two patches that edit, and modules: one in a new folder, and an empty one. Of the files that
    are edited, one may not be written, and one is a link."""
    files = {"torch/a.py": "".join(f"a{i} = {i}\n" for i in range(20)), "torch/sub/b.py": "# ünicode\nb = 1\n"}
    files["torch/sub/linked.py"] = files["torch/sub/b.py"]
    for name, text in files.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "tree" / "torch" / "sub" / "b.py").chmod(0o755)
    (folder / "tree" / "torch" / "a.py").chmod(0o444)
    link = folder / "tree" / "torch" / "sub" / "linked.py"
    link.rename(link.with_name("elsewhere.py"))
    link.symlink_to("elsewhere.py")
    for name, text in {"_engine/patched_init.py": "", "__init__.py": "0\n", "deep/c.py": "c = '…'\n"}.items():
        path = folder / "torch_overlay" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    first = files["torch/a.py"]
    patches = {
        "one.patch": "Subject: one\n---\n\n"
        + series.edit_diff("torch/a.py", first, first.replace("a3", "# “first”\na3").replace("a18", "# second\na18")),
        "two.patch": "Subject: two\n---\n\n"
        + "".join(
            series.edit_diff(name, files[name], "x\n" + files[name])
            for name in ("torch/sub/b.py", "torch/sub/linked.py")
        ),
    }
    patches["series"] = "one.patch\ntwo.patch\n"
    write_series(folder / "patches" / "v0", patches)
    record = {"tag": "v0", "files": {name: series.sha256(text) for name, text in files.items()}}
    (folder / "base.json").write_text(json.dumps(record))
    series.BASE, series.ROOT = folder / "base.json", folder


def write_series(folder: Path, patches: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**patches, series.SUMS: series.sums(patches)}.items():
        (folder / name).write_bytes(text.encode())


class Faults:
    """A tree in both of its states, and a place to break copies of it."""

    def __init__(self, folder: Path) -> None:
        self.trees = {APPLY: folder / "tree", REVERSE: folder / "applied"}  # by what can be done to them
        self.copy = folder / "copy"
        shutil.copytree(self.trees[APPLY], self.trees[REVERSE], symlinks=True)
        must(run(self.trees[REVERSE]).status == 0, "the series does not apply")
        self.pristine, self.applied = snapshot(self.trees[APPLY]), snapshot(self.trees[REVERSE])
        self.steps: collections.Counter[str] = collections.Counter()

    def fresh(self, source: Path) -> Path:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(source, self.copy, symlinks=True)
        return self.copy

    def is_whole(self, tree: Tree) -> bool:
        return files(tree) in (files(self.pristine), files(self.applied))

    def wanted(self, options: tuple[str, ...]) -> Tree:
        return self.applied if options == APPLY else self.pristine

    def directions(self) -> Iterator[tuple[tuple[str, ...], Path]]:
        yield APPLY, self.trees[APPLY]
        yield REVERSE, self.trees[REVERSE]

    def recovers(self, root: Path, where: str) -> None:
        """The tree is whole or --check says what it is not; each direction then ends in the tree that it is to make."""
        broken = snapshot(root)
        is_whole, saved = self.is_whole(broken), root.with_name("saved")
        self.steps["whole" if is_whole else "unfinished"] += 1
        for options in (APPLY, REVERSE):
            result = run(root, "--check", *options)
            must(snapshot(root) == broken, f"{where}: --check changes something")
            must(("has not ended" in result.output) != is_whole, f"{where}: --check says {result.output}")
            must(result.status == 1 or is_whole, f"{where}: --check passes")
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(root, saved, symlinks=True)
            again = run(saved, *options)
            must(snapshot(saved) == self.wanted(options), f"{where}, then {options}: another tree\n{again.output}")
            must(("had not ended" in again.output) != is_whole, f"{where}: it says {again.output}")
            must(again.status == 0 or is_whole, f"{where}, then {options}: {again.output}")

    def kill(self) -> None:
        for options, tree in self.directions():
            for position in range(1, 100_000):
                root = self.fresh(tree)
                result = run(root, *options, fault=kill_at(position))
                if not result.killed:
                    must(snapshot(root) == self.wanted(options), result.output)
                    break
                self.recovers(root, f"killed before operation {position} of {options}")

    def errors(self) -> None:
        kinds = [(errno.ENOSPC, ALLOCATING, True), (errno.ENOSPC, ALLOCATING, False)]
        kinds += [(errno.EIO, None, True), (errno.EROFS, None, False)]
        for code, events, once in kinds:
            for options, tree in self.directions():
                before = snapshot(tree)
                reached = True
                position = 0
                while reached:
                    position += 1
                    root, counter = self.fresh(tree), self.copy.with_name("count")
                    fault = fail(position, code, events, once)

                    def counted(count: int, kind: str) -> None:
                        if count == position:  # noqa: B023
                            counter.touch()  # noqa: B023
                        fault(count, kind)  # noqa: B023

                    counter.unlink(missing_ok=True)
                    result = run(root, *options, fault=guarded(counted))
                    reached = counter.exists()
                    where = f"{os.strerror(code)}, operation {position}"
                    self.after_error(root, options, before, result, where)
                    must("half changed" not in result.output or code == errno.EROFS, f"{where}: not rolled back")

    def after_error(self, root: Path, options: tuple[str, ...], before: Tree, result: Result, where: str) -> None:
        now = files(snapshot(root))
        self.steps[where.partition(",")[0]] += 1
        must(result.status in (0, 1), f"{where}: {result.output}")
        if "half changed" in result.output:
            self.steps["half changed"] += 1
            self.recovers(root, where)
        elif result.status == 1:
            must("Nothing was changed" in result.output, f"{where}: {result.output}")
            must(now == files(before), f"{where}: something was changed\n{result.output}")
            must("No space" not in result.output or snapshot(root) == before, f"{where}: something was left")
        else:
            must(now == files(self.wanted(options)), f"{where}: {result.output}")

    def races(self) -> None:
        pairs = [
            (one, two, tree) for one in (APPLY, REVERSE) for two in (APPLY, REVERSE) for tree in self.trees.values()
        ]
        for round_, (one, two, tree) in enumerate(pairs * 6):
            root = self.fresh(tree)
            children = []
            for options in (one, two):
                child = os.fork()
                if child == 0:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    os.dup2(1, 2)
                    if round_ % 2:  # switches processes between any two operations
                        Operations(lambda count, kind: os.sched_yield())
                    os._exit(apply_patches.main([*options, str(root)]))
                children.append(child)
            ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            result = snapshot(root)
            where = f"{one} and {two} at once on {tree.name}: {ended}"
            must(set(ended) <= {0, 1}, where)
            must(result in (self.pristine, self.applied), f"{where}: a mixed tree")
            if one == two:
                first = tree == self.trees[one]
                must(result == self.wanted(one) and ended.count(0) == int(first), where)
            self.steps["pairs"] += 1


def guarded(fault: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """The operations of a fault itself don't count."""
    inside = False

    def guard(count: int, kind: str) -> None:
        nonlocal inside
        if not inside:
            inside = True
            try:
                fault(count, kind)
            finally:
                inside = False

    return guard


def must(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(message)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=("kill", "errors", "races"))
    fault = parser.parse_args(argv).fault
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of small trees
    with tempfile.TemporaryDirectory(dir=memory) as name:
        make_small(Path(name))
        faults = Faults(Path(name))
        getattr(faults, fault)()
        print(json.dumps(faults.steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
