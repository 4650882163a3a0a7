"""Compares docs/api.md with the package: names, signatures, options, fields, and the JSON that the doctor emits."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any, TYPE_CHECKING

from pages import blocks, tables

import form


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


PAGE = "docs/api.md"
MODULES = "torch_overlay", "torch_overlay.cudagraphs", "torch_overlay.analysis", "torch_overlay.testing"
RECORDS = {  # where the records of the page's small tables are
    "Finding": "torch_overlay.analysis.doctor.diagnosis",
    "Trial": "torch_overlay.analysis.doctor.diagnosis",
    "Work": "torch_overlay.analysis.doctor.diagnosis",
    "Function": "torch_overlay._inductor.relaunch.coverage",
    "RegionCoverage": "torch_overlay._inductor.relaunch.coverage",
    "Outside": "torch_overlay._inductor.relaunch.coverage",
    "Race": "torch_overlay.analysis.race_check.happens_before",
    "Redundant": "torch_overlay.analysis.race_check.happens_before",
    "Promise": "torch_overlay.analysis.race_check.race_report",
}
KINDS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
PROGRAM = """
import torch

def forward(x, w):
    y = torch.tanh(x @ w)
    return y.sum().item() + y[y > 0].sum()

def forward_inputs():
    return torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
"""


def section(title: str) -> list[list[list[str]]]:
    """The tables of a section, without their heads."""
    text = (form.ROOT / PAGE).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [table[1:] for table in tables(f"{text}\n")]


def named(cell: str) -> list[str]:
    return re.findall(r"`([A-Za-z_]+)", cell)


def as_text(name: str, value: Any) -> str:
    """A name as the page has it: of a function and of a class without parameters to set with its signature."""
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, Exception)):
        return name
    if name == "Simulation" or not callable(value):
        return name
    signature = inspect.signature(value)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return name + re.sub(r"<function [^>]*>", "...", text)


def public(record: type) -> set[str]:
    """Fields, properties and methods of a dataclass; its properties and methods begin with no underscore."""
    fields = {field.name for field in dataclasses.fields(record)}
    return fields | {name for name in vars(record) if not name.startswith("_")}


def violations(value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any], at: str = "$") -> list[str]:
    """Of the part of JSON Schema that the page uses."""
    if "$ref" in schema:
        return violations(value, whole["$defs"][schema["$ref"].removeprefix("#/$defs/")], whole, at)
    if "anyOf" in schema:
        found = [violations(value, each, whole, at) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(KINDS[kind](value) for kind in kinds):
        return [f"{at} is {value!r}, no {schema['type']}"]
    found = []
    if isinstance(value, list) and "items" in schema:
        for number, each in enumerate(value):
            found += violations(each, schema["items"], whole, f"{at}[{number}]")
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{at} has no {key}" for key in schema["required"] if key not in value]
        found += [f"{at}.{key} is not in the schema" for key in value if key not in schema["properties"]]
        for key in value.keys() & schema["properties"].keys():
            found += violations(value[key], schema["properties"][key], whole, f"{at}.{key}")
    return found


@form.overlay_only
class TestApiPage(unittest.TestCase):
    def test_names_and_signatures(self) -> None:
        for name in MODULES:
            with self.subTest(name):
                module = importlib.import_module(name)
                written = [row[0].strip("`") for row in section(name)[0]]
                self.assertEqual(sorted(written), sorted(as_text(n, getattr(module, n)) for n in module.__all__))

    def test_classes_of_modules_have_the_fields_that_the_page_lists(self) -> None:
        for name in MODULES[2:]:
            module = importlib.import_module(name)
            for row in section(name)[0]:
                found = getattr(module, row[0].strip("`").partition("(")[0])
                if dataclasses.is_dataclass(found) and row[0] != "`Report`":
                    with self.subTest(row[0]):
                        fields = public(found)  # type: ignore[arg-type]
                        self.assertEqual(fields - {*named(row[1])}, set())
                        self.assertEqual({*named(row[1])} - fields - {"check_trace"}, set())

    def test_fields_of_results(self) -> None:
        from torch_overlay._inductor.relaunch.coverage import Coverage
        from torch_overlay.analysis import Report
        from torch_overlay.analysis.doctor import Diagnosis

        for record in (Diagnosis, Coverage, Report):
            with self.subTest(record.__name__):
                written = [row[0] for row in section(record.__name__)[0]]
                self.assertEqual({name.strip("`").removesuffix("()") for name in written}, public(record))
                calls = {n for n in public(record) if inspect.isfunction(inspect.getattr_static(record, n, None))}
                self.assertEqual({name.strip("`()") for name in written if name.endswith("()`")}, calls)

    def test_fields_of_records(self) -> None:
        rows = [row for title in ("Diagnosis", "Coverage", "Report") for row in section(title)[1]]
        self.assertEqual([row[0].strip("`") for row in rows], list(RECORDS))
        for (name, module), row in zip(RECORDS.items(), rows, strict=True):
            with self.subTest(name):
                fields = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
                self.assertEqual({*named(row[1])} - {"Work"}, fields)

    def test_status(self) -> None:
        from torch_overlay._engine.report import Feature, SeamState, Status

        (row,) = [row for row in section("torch_overlay")[0] if row[0] == "`status()`"]
        expected = {"Status", *public(Status), *public(Feature), *public(SeamState)}
        self.assertEqual({*named(row[1])}, expected)

    def test_options(self) -> None:
        from torch_overlay import config
        from torch_overlay._options import OPTIONS, OTHERS, PREFIX

        rows = section("Options")
        for (name, default, takes, _), option in zip(rows[0], OPTIONS, strict=True):
            with self.subTest(option):
                self.assertEqual(name, f"`{option}`")
                self.assertEqual(default, f"`{config._config[option].default!r}`")  # type: ignore[attr-defined]
                self.assertEqual(takes, OPTIONS[option].takes)
        variables = " ".join(row[0] for row in rows[1])
        self.assertEqual([name for name in OTHERS if f"{PREFIX}{name}" not in variables], [])

    def test_reasons_of_errors_are_documented_where_the_page_says(self) -> None:
        from torch_overlay import errors, OverlayError

        error = OverlayError("wrong_version", "torch", "2.15.0", "2.14.0", "Install it.")
        (row,) = [row for row in section("torch_overlay")[0] if row[0] == "`OverlayError`"]
        self.assertEqual({*vars(error)} - {*named(row[1])}, set())
        self.assertIn(error.reason, errors.REASONS)


@form.overlay_only
class TestSchema(unittest.TestCase):
    def setUp(self) -> None:
        (text,) = blocks(PAGE, "json")
        self.schema = json.loads(text)

    def test_of_a_command(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.py")
            path.write_text(PROGRAM)
            done = form.fork_command("doctor", "--simulate", "--no-tries", "--json", f"{path}:forward")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual(violations(found, self.schema, self.schema), [])
        self.assertTrue(found["findings"] and found["coverage"]["functions"])

    def test_of_all_that_a_diagnosis_can_hold(self) -> None:
        """A result with times, as a GPU gives it: each record that a program may or may not have is there."""
        from torch_overlay._inductor.relaunch.coverage import Coverage, Function, Outside, RegionCoverage
        from torch_overlay.analysis.doctor.diagnosis import Diagnosis, Finding, Span, StepTimeline, Trial, Work

        cause = "host-wait", "aten::item", "model.py:3: x.item()", "the host waits", "don't"
        outside = Outside(*cause, 2, 6)
        region = RegionCoverage("inference", "model.py:2", 8, 7, 3, 1, 1, 3, 0.5)
        function = Function("inference #1", "model.py:2", 8, (region,), (outside,), (("resident", "model.py:4"),), 1)
        coverage = Coverage((function,), (outside,), (("reason", 2),), (outside,))
        trials = (
            Trial("host-wait", "f", Work(), Work(1.0), 1.0, 0.5),
            Trial("host-wait", "g", Work(), None, error="no"),
        )
        timeline = StepTimeline((Span("k", "stream 7", 0.0, 2.0, True),), {"aten::item": (1.0, 2.0)})
        findings = (Finding(*cause, 1.0, 2.0, None, 1.0),)
        found = Diagnosis("f", "H100", False, 0.5, 1.0, 2.0, findings, trials, json.loads(coverage.to_json()), "table")
        found = dataclasses.replace(found, timeline=timeline, guards_us=3.0)
        self.assertEqual(violations(json.loads(found.to_json()), self.schema, self.schema), [])
        self.assertEqual({*json.loads(found.to_json())}, {*self.schema["properties"]})

    def test_differences_are_found(self) -> None:
        schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
        for value, expected in (
            ({"a": 1}, []),
            ({"a": True}, ["$.a is True, no integer"]),
            ({}, ["$ has no a"]),
            ({"a": 1, "b": 2}, ["$.b is not in the schema"]),
            ([], ["$ is [], no object"]),
        ):
            self.assertEqual(violations(value, schema, schema), expected)
