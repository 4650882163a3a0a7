"""`csrc/numbers.c` computes as Python does."""

import math
import random
import struct

from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins import c_module
from torch_overlay._inductor.relaunch.numbers.expressions import (
    CODES,
    constant,
    evaluate,
    LETTERS,
    OPERATIONS,
    pack,
    RegisterProgram,
    TYPES,
    Unfit,
)


# run(program, types, inputs): the words of the results, or None if the numbers are
# unfit. The results after those that have a type are integers.
PART = """
#include "driver_api.h"
#include "module.h"
#include "numbers.h"

static PyObject *run(PyObject *module, PyObject *args) {
  PyObject *numbers, *types, *inputs, *result = NULL;
  Program program = {0};
  Pool pool = NULL;
  Word word[8];
  uint64_t value[8];
  int code = -1;
  if (!PyArg_ParseTuple(args, "OO!O!", &numbers, &PyTuple_Type, &types, &PyList_Type,
                        &inputs))
    return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++)
    word[i].type = (int)PyLong_AsLong(PyTuple_GET_ITEM(types, i));
  if (!program_init(&program, &pool, numbers)) {
    if (program.least > PyList_GET_SIZE(inputs) || program.results > 8)
      PyErr_SetString(PyExc_IndexError, "too few inputs, or too many results");
    else
      code = program_run(&program, inputs, word, PyTuple_GET_SIZE(types), value);
    if (code == 1)
      result = PyBytes_FromStringAndSize((char *)value, 8 * program.results);
    else if (!code)
      result = Py_NewRef(Py_None);
  }
  pool_free(&pool);
  return result;
}
static PyObject *size(PyObject *module, PyObject *type) {
  return PyLong_FromSize_t(size_of_word((int)PyLong_AsLong(type)));
}
static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS}, {"size", size, METH_O}, {NULL}};
PART(.module = "numbers_test", .methods = methods)
"""
N, M, X = ("input", 0, int), ("input", 1, int), ("input", 2, float)
OF_FLOATS = ("fadd", "fsub", "fmul", "fdiv", "fneg")
ROUNDING = ("ceil", "floor")
EDGES = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, -3.5, 1e300, -1e-300, math.inf)


def fields(program):
    return program.inputs, program.constants, program.code, program.results


def draw(rng, kind, depth=4):
    """An expression of this type."""
    if not depth or rng.random() < 0.15:
        value = rng.choice(FLOATS) if kind is float else rng.choice((*EDGES, 3, -5))
        return rng.choice((constant(value), *((X,) if kind is float else (N, M))))
    if kind is float and rng.random() < 0.3:
        return "float", draw(rng, int, depth - 1)
    if kind is int and rng.random() < 0.2:
        return rng.choice(ROUNDING), draw(rng, float, depth - 1)
    names = [name for name in OPERATIONS if (name in OF_FLOATS) == (kind is float)]
    name = rng.choice([name for name in names if name not in ("float", *ROUNDING)])
    count = 1 if name in ("neg", "fneg", "positive", "nonzero", "zero") else 2
    return name, *[draw(rng, kind, depth - 1) for _ in range(count)]


@c_module.needs_compiler
class TestProgram(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        module, _ = c_module.build_module("", part=PART)
        cls.c = module.numbers_test

    def run_program(self, expressions, letters, *inputs):
        types = tuple(LETTERS.index(letter) for letter in letters)
        return self.c.run(fields(RegisterProgram.of(expressions)), types, list(inputs))

    def check(self, expressions, letters, *inputs):
        """C and Python agree. Return what C has made."""
        made = self.run_program(expressions, letters, *inputs)
        try:
            values = [evaluate(expression, inputs) for expression in expressions]
            want = [pack(*pair) for pair in zip(letters, values)]
        except Unfit:
            self.assertIsNone(made)
            return None
        self.assertIsNotNone(made)
        for i, (word, value) in enumerate(zip(want, values)):
            got, word = made[8 * i :][:8], word.ljust(8, b"\0")
            if value == value:
                self.assertEqual(got, word)
            else:  # NaNs differ in their sign
                self.assertTrue(math.isnan(struct.unpack("<d", got)[0]))
        return made

    def test_drawn_expressions(self):
        rng, fit = random.Random(0), 0
        for _ in range(600):
            kinds = [rng.choice((int, float)) for _ in range(rng.randrange(1, 4))]
            expressions = [draw(rng, kind) for kind in kinds]
            letters = ["d" if kind is float else "l" for kind in kinds]
            for numbers in (EDGES, range(-9, 9)):
                n, m = rng.choice(numbers), rng.choice(numbers)
                made = self.check(expressions, letters, n, m, rng.choice(FLOATS))
                fit += made is not None
        self.assertTrue(300 < fit < 900, fit)

    def test_each_operation(self):
        for name in OPERATIONS:
            count = 1 if name in ("neg", "fneg", "float", *ROUNDING) else 2
            operands = [X, X] if name in (*OF_FLOATS, *ROUNDING) else [N, M]
            letter = "d" if name in ("float", *OF_FLOATS) else "l"
            if name in ("positive", "nonzero", "zero"):
                count = 1
            for n in (-7, -1, 0, 1, 7, 2**63 - 1):
                for m in (-3, -1, 0, 1, 3, -(2**63)):
                    self.check([(name, *operands[:count])], letter, n, m, n / 4)
        self.assertEqual(list(CODES), list(OPERATIONS))

    def test_types_of_parameters(self):
        sizes = [len(pack(letter, 1)) for letter in LETTERS]
        self.assertEqual([self.c.size(i) for i in range(len(LETTERS))], sizes)
        self.assertEqual([self.c.size(i) for i in (-1, len(LETTERS))], [0, 0])
        fit = 0
        for letter in TYPES:
            for value in (0, -1, 127, 128, 255, 256, *EDGES):
                fit += self.check([N], letter, value, 0, 0.0) is not None
            self.check([X], letter, 0, 0, 2.5)  # a float in a parameter of integers
        self.assertTrue(60 < fit < 130, fit)

    def test_inputs_of_another_type(self):
        for n, x in ((True, 0.5), (2.0, 0.5), (2, 1), (2**63, 0.5), (None, 0.5)):
            self.assertIsNone(self.run_program([N, X], "ld", n, 0, x))

    def test_results_without_a_type(self):
        made = self.run_program([N, ("mul", N, M)], "i", 5, -7, 0.0)
        self.assertEqual(struct.unpack("<2q", made), (5, -35))

    def test_many_registers(self):
        expression = N
        for i in range(200):
            expression = "add", expression, constant(1000 + i)
        self.check([expression], "l", 1, 0, 0.0)
