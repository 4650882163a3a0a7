"""Options say what they take where they are set: by an assignment, by `config.patch`, in the environment."""

import contextlib
import importlib
import math
import pickle
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch._inductor.config

import form
from torch_overlay import _options, config
from torch_overlay._options import MODES


SWITCHES = ("streams", "cudagraph_verify", "cudagraph_concurrency", "cudagraph_rewrites")
WRONG = {
    **dict.fromkeys(SWITCHES, ("abc", "0", "False", 0, 1, 2, None, math.nan, [], {})),
    "nvtx": ("abc", "0", "None", 0, 1, 2, math.nan, [], {}),
    "fold_branches_below_us": (math.nan, -1, -0.5, -math.inf, "x", "5", None, True, [5.0], 5j),
    "activation_offload": (
        "x",
        -1,
        20,
        True,
        math.nan,
        {},
        {"budget_gb": math.nan},
        {"budget_gb": -1},
        {"budget_gb": 1e300},
        {"budget": 1},
    ),
    "cudagraphs": ("abc", "", "Trees", None, True, False, 1, ["off"]),
    "cudagraph_templates": (-3, -1, 2.0, math.nan, "x", "64", None, True),
}
RIGHT = {
    **dict.fromkeys(SWITCHES, (True, False)),
    "nvtx": (None, True, False),
    "fold_branches_below_us": (0, 5, 2.5, math.inf),
    "activation_offload": (None, "auto", {"budget_gb": 12.5}, {"budget_gb": 0, "strict": False, "min_bytes": 1}),
    "cudagraphs": MODES,
    "cudagraph_templates": (0, 1, 64),
}


def values() -> dict[str, object]:
    return {name: getattr(config, name) for name in RIGHT}


class TestAssignment(unittest.TestCase):
    def test_every_option_has_a_rule(self) -> None:
        options = {name for name in config._config if name[0].islower()}
        self.assertEqual(options, set(RIGHT))

    def test_values_that_are_taken(self) -> None:
        before = values()
        for name, right in RIGHT.items():
            for value in right:
                with self.subTest(name, value=value), config.patch({name: value}):
                    self.assertEqual(getattr(config, name), value)
        self.assertEqual(values(), before)

    def test_values_that_are_refused(self) -> None:
        """... with the option, what it takes, and the value; and it stays as it was."""
        ways = {
            "assignment": lambda name, value: setattr(config, name, value),
            "patch": lambda name, value: config.patch({name: value}),
            "patch by keyword": lambda name, value: config.patch(**{name: value}),
            "closure": lambda name, value: config._make_closure_patcher(**{name: value})(),
            "load": lambda name, value: config.load_config({name: value}),
            "load pickled": lambda name, value: config.load_config(pickle.dumps({name: value})),
            "mock": lambda name, value: mock.patch.object(config, name, value).start(),
        }
        before = values()
        for name, wrong in WRONG.items():
            for value in wrong:
                for way, put in ways.items():
                    with self.subTest(name, value=str(value)[:20], way=way):
                        with self.assertRaises(ValueError) as caught:
                            put(name, value)
                        self.assertRegex(str(caught.exception), rf"config\.{name} (takes|is)")
                        self.assertIn(repr(value)[:100], str(caught.exception))
                        self.assertEqual(values(), before)

    def test_nothing_is_half_set(self) -> None:
        """One wrong value among right ones, or one wrong name: all stay."""
        before = values()
        wrong: tuple[tuple[dict[str, object], type[Exception]], ...] = (
            ({"streams": False, "cudagraph_templates": -3}, ValueError),
            ({"cudagraph_templates": -3, "streams": False}, ValueError),
            ({"streams": False, "no_such_option": 1}, AttributeError),
        )
        for changes, error in wrong:
            for how in (lambda changes: config.patch(changes), lambda changes: config.patch(**changes)):
                with self.subTest(changes), self.assertRaises(error), how(changes):
                    self.fail("entered")
                self.assertEqual(values(), before)
        with self.assertRaises(ValueError):
            config.load_config({"streams": False, "cudagraph_templates": -3})
        self.assertEqual(values(), before)

    def test_changes_are_those_that_were_checked(self) -> None:
        changes: dict[str, object] = {"streams": False}
        patch = config.patch(changes)
        changes["cudagraph_templates"] = -3
        before = values()
        with patch:
            self.assertEqual(values(), {**before, "streams": False})
        self.assertEqual(values(), before)

    def test_configuration_is_restored_when_the_body_fails(self) -> None:
        before = values()
        with contextlib.suppress(ZeroDivisionError), config.patch(streams=False, cudagraphs="off"):
            1 / 0  # noqa: B018
        self.assertEqual(values(), before)

    def test_decorator(self) -> None:
        with self.assertRaises(ValueError):

            @config.patch(streams="abc")
            def never() -> None: ...

        self.assertFalse(config.patch(streams=False)(lambda: config.streams)())

    def test_assignment_holds_in_its_thread_and_in_hashes(self) -> None:
        before = config.get_hash()
        with config.patch(streams=False), ThreadPoolExecutor(1) as pool:
            self.assertTrue(pool.submit(lambda: config.streams).result())
            self.assertNotEqual(config.get_hash(), before)
        self.assertEqual(config.get_hash(), before)

    @form.overlay_only
    def test_status_says_what_is_on_and_who_decided(self) -> None:
        def found() -> list[tuple[bool, str]]:
            features = {feature.name: feature for feature in form.overlay.status().features}
            return [(features[name].on, features[name].why) for name in ("streams", "cudagraphs")]

        with mock.patch.dict("os.environ", TORCH_OVERLAY_STREAMS="0"):  # was not set at the import
            self.assertEqual(found(), [(True, "default"), (True, "default")])
            with config.patch(streams=False, cudagraphs="off"):
                assigned = "torch_overlay.config.{} was assigned".format
                self.assertEqual(found(), [(False, assigned("streams")), (False, assigned("cudagraphs"))])
            with torch._inductor.config.patch(fx_wrapper=True):
                (on, why), _ = found()
                self.assertFalse(on)
                self.assertIn("torch._inductor.config asks for an FX wrapper", why)
        self.assertIn("but for FX wrappers", str(form.overlay.status()))

    def test_status_of_a_value_that_no_option_takes(self) -> None:
        """Put there past the checks, or deleted."""

        class Odd:
            def __eq__(self, other: object) -> bool:
                raise TypeError("no answer,\nin two lines")

            def __repr__(self) -> str:
                return "two\nlines"

            __hash__ = None  # type: ignore[assignment]

        entries = config._config
        for name, value in (("streams", "abc"), ("cudagraphs", Odd()), ("activation_offload", Odd())):
            with self.subTest(name):
                token = entries[name].user_override.set(value)
                self.addCleanup(entries[name].user_override.reset, token)
                (line,) = (line for line in str(form.overlay.status()).splitlines() if line.startswith(f"{name} "))
                self.assertRegex(line, r"  not understood: ")
        with mock.patch.object(entries["nvtx"], "hide", True):
            self.assertRegex(str(form.overlay.status()), r"nvtx .*not understood: .*nvtx does not exist\n")

    def test_loaded_again_is_one_clear_error(self) -> None:
        with self.assertRaisesRegex(ImportError, r"torch_overlay\.config can't be loaded again: set its options, or"):
            importlib.reload(config)
        with self.assertRaises(ValueError):
            config.streams = "abc"


SHOW = "import torch_overlay\nprint([getattr(torch_overlay.config, name) for name in {}])"


@form.overlay_only
class TestEnvironment(unittest.TestCase):
    """Variables are read at the import, in a process of its own; several are set at once, since it takes seconds."""

    def test_usual_spellings(self) -> None:
        for text, value in (
            *((text, True) for text in ("1", "true", "YES", "On", " y ")),
            *((text, False) for text in ("0", "false", "No", "OFF", "n")),
        ):
            with self.subTest(text), mock.patch.dict("os.environ", TORCH_OVERLAY_STREAMS=text):
                self.assertEqual(_options.from_environment(), {"streams": value})
                self.assertEqual(_options.switched_on("TORCH_OVERLAY_STREAMS"), value)
        with mock.patch.dict("os.environ", TORCH_OVERLAY_STREAMS="", TORCH_OVERLAY_CUDAGRAPHS=" "):
            self.assertEqual(_options.from_environment(), {})
            self.assertFalse(_options.switched_on("TORCH_OVERLAY_STREAMS"))

    def test_none_is_the_default_of_nvtx(self) -> None:
        for text, value in (("None", None), ("on", True), ("0", False)):
            with mock.patch.dict("os.environ", TORCH_OVERLAY_NVTX=text):
                self.assertEqual(_options.from_environment(), {"nvtx": value})

    def test_variables_that_nobody_reads(self) -> None:
        given = {"STREAM": "0", "CUDAGRAPHS": "off", "DISABLE": "1", "ZZZ": ""}
        given = {f"TORCH_OVERLAY_{name}": text for name, text in given.items()}
        with mock.patch.dict("os.environ", given), self.assertLogs(_options.log, "WARNING") as logs:
            _options.warn_of_unknown_variables()
        said = "is set in the environment, but torch_overlay reads no such variable"
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            [f"TORCH_OVERLAY_STREAM {said}; did you mean TORCH_OVERLAY_STREAMS?", f"TORCH_OVERLAY_ZZZ {said}"],
        )

    def test_variables_change_the_defaults_and_status_says_so(self) -> None:
        env = {
            "streams": ("no", False),
            "fold_branches_below_us": ("2.5", 2.5),
            "activation_offload": ("AUTO", "auto"),
            "cudagraphs": ("Trees", "trees"),
            "cudagraph_templates": ("8", 8),
            "cudagraph_concurrency": ("", True),
        }
        code = SHOW.format(list(env)) + (
            "\nprint([(f.name, f.on) for f in torch_overlay.status().features if 'environment' in f.why])"
            "\nwith torch_overlay.config.patch(streams=True): print(torch_overlay.config.streams)"
            "\nprint(torch_overlay.config.streams)"
        )
        result = form.fork_python(code, env={f"TORCH_OVERLAY_{n.upper()}": text for n, (text, _) in env.items()})
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(lines[0], str([value for _, value in env.values()]))
        on = {"fold_branches_below_us", "activation_offload", "cudagraphs", "cudagraph_templates"}
        self.assertEqual(sorted(eval(lines[1])), sorted((n, n in on) for n in env if n != "cudagraph_concurrency"))
        self.assertEqual(lines[2:], ["True", "False"])

    def test_unknown_spellings_are_one_error(self) -> None:
        for name, text, takes in (
            ("streams", "maybe", "1, true, yes or on, or 0, false, no or off"),
            ("streams", "2", "1, true, yes or on, or 0, false, no or off"),
            ("cudagraphs", "1", '"relaunch", "trees" or "off"'),
            ("cudagraph_templates", "-3", "an int, not negative"),
            ("cudagraph_templates", "8.5", "an int, not negative"),
            ("fold_branches_below_us", "nan", "a number of microseconds"),
            ("activation_offload", "lots", "auto, none, or a number of gigabytes"),
            ("activation_offload", "1e300", "auto, none, or a number of gigabytes"),
        ):
            name = _options.variable(name)
            with self.subTest(name, text=text), mock.patch.dict("os.environ", {name: text}):
                with self.assertRaises(ValueError) as caught:
                    _options.from_environment()
                message = str(caught.exception)
                for part in (f"{name} is {text!r} in the environment; it takes ", takes):
                    self.assertIn(part, message)

    @form.slow
    def test_import_refuses_and_installs_nothing(self) -> None:
        code = """
import sys, torch
import torch._guards as guards
for _ in range(2):
    try:
        import torch_overlay
    except ValueError as error:
        print(error)
    else:
        raise SystemExit("imported")
assert "__overlay__" not in vars(guards.CompileContext.__init__)
assert not any("Late" in type(finder).__name__ for finder in sys.meta_path)
"""
        for name in ("TORCH_OVERLAY_STREAMS", "TORCH_OVERLAY_DISABLE"):
            with self.subTest(name):
                result = form.fork_python(code, env={name: "perhaps"})
                expected = (
                    f"{name} is 'perhaps' in the environment; it takes 1, true, yes or on, or 0, false, no or off"
                )
                self.assertEqual(result.stdout.splitlines(), [expected] * 2, result.stderr)

    def test_disabled_in_other_spellings(self) -> None:
        code = "import torch_overlay; s = torch_overlay.status(); print(s.enabled, s.why)"
        # An option's variable that isn't understood doesn't matter then.
        result = form.fork_python(code, env={"TORCH_OVERLAY_DISABLE": "Yes", "TORCH_OVERLAY_STREAMS": "perhaps"})
        self.assertEqual(result.stdout, "False TORCH_OVERLAY_DISABLE=Yes is set in the environment\n", result.stderr)
        result = form.fork_python(code, env={"TORCH_OVERLAY_DISABLE": "off"})
        self.assertTrue(result.stdout.startswith("True"), result.stderr)
