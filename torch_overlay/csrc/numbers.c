/* The numbers of a launch, computed by a program on registers: `numbers.expressions`. */

#include <limits.h>

#include "driver_api.h"
#include "numbers.h"

enum {
    ADD,
    SUB,
    MUL,
    FLOORDIV,
    MOD,
    NEG,
    FADD,
    FSUB,
    FMUL,
    FDIV,
    FNEG,
    CEIL,
    FLOOR,
    FLOAT,
    MAX,
    POSITIVE,
    NONZERO,
    ZERO,
    OPERATIONS
};

size_t size_of_word(Py_ssize_t type) {
    static const size_t size[] = {1, 2, 4, 8, 1, 2, 4, 8, 4, 8};
    return type < 0 || type >= TYPES ? 0 : size[type];
}

static int takes_floats(Py_ssize_t operation) { return operation >= FADD && operation <= FLOOR; }

static int makes_a_float(Py_ssize_t operation) {
    return (operation >= FADD && operation <= FNEG) || operation == FLOAT;
}

static int read_registers(Program *self, PyObject *inputs, PyObject *constants) {
    static const Py_ssize_t ends[] = {PY_SSIZE_T_MAX, 2};
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        Py_ssize_t input[2];
        if (read_record(inputs, i, "number", 2, ends, input)) return -1;
        self->position[i] = input[0];
        self->is_float[i] = (unsigned char)input[1];
        if (input[0] >= self->least) self->least = input[0] + 1;
    }
    for (Py_ssize_t i = 0; i < self->constants; i++) {
        PyObject *value = PyTuple_GET_ITEM(constants, i);
        Number *at = &self->start[self->inputs + i];
        if ((self->is_float[self->inputs + i] = PyFloat_Check(value)))
            at->d = PyFloat_AsDouble(value);
        else
            at->i = PyLong_AsLongLong(value);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static int read_steps(Program *self, PyObject *steps) {
    Py_ssize_t first = self->inputs + self->constants;
    for (Py_ssize_t i = 0; i < self->steps; i++) {
        const Py_ssize_t ends[] = {OPERATIONS, first + i, first + i};
        Py_ssize_t step[3];
        if (read_record(steps, i, "step", 3, ends, step)) return -1;
        self->step[i] = (Step){step[0], step[1], step[2]};
        if (self->is_float[step[1]] != takes_floats(step[0]) || self->is_float[step[2]] != takes_floats(step[0]))
            return refuse("a step of numbers takes a number of another type");
        self->is_float[first + i] = (unsigned char)makes_a_float(step[0]);
    }
    return 0;
}

int program_init(Program *self, Pool *pool, PyObject *numbers) {
    PyObject *inputs, *constants, *steps, *results;
    Py_ssize_t registers;
    if (!is_tuple(numbers, "the numbers", -1)
        || !PyArg_ParseTuple(numbers, "O!O!O!O;numbers are (inputs, constants, steps, results)", &PyTuple_Type, &inputs,
                             &PyTuple_Type, &constants, &PyTuple_Type, &steps, &results))
        return -1;
    self->inputs = PyTuple_GET_SIZE(inputs);
    self->constants = PyTuple_GET_SIZE(constants);
    self->steps = PyTuple_GET_SIZE(steps);
    registers = self->inputs + self->constants + self->steps;
    if (!(self->position = pool_zeros(pool, self->inputs, sizeof *self->position))
        || !(self->is_float = pool_zeros(pool, registers, sizeof *self->is_float))
        || !(self->start = pool_zeros(pool, registers, sizeof *self->start))
        || !(self->step = pool_zeros(pool, self->steps, sizeof *self->step)) || read_registers(self, inputs, constants)
        || read_steps(self, steps)
        || !(self->result = read_row(pool, results, "a result", 0, registers, &self->results)))
        return -1;
    return 0;
}

/* Quotient and remainder as Python has them: rounded down, and with the sign of the divisor. */
static int divide(int64_t a, int64_t b, int64_t *quotient, int64_t *remainder) {
    if (!b || (a == INT64_MIN && b == -1)) return 0;
    *quotient = a / b;
    *remainder = a % b;
    if (*remainder && (*remainder < 0) != (b < 0)) {
        *quotient -= 1;
        *remainder += b;
    }
    return 1;
}

/* 0: the number has more bits than a float. */
static int rounded(double value, int64_t *to) {
    if (!(value >= -0x1p53 && value <= 0x1p53)) return 0;
    *to = (int64_t)value;
    return 1;
}

static int compute(const Step *step, const Number *from, Number *to) {
    const Number a = from[step->a], b = from[step->b];
    int64_t other;
    switch (step->operation) {
    case ADD: return !__builtin_add_overflow(a.i, b.i, &to->i);
    case SUB: return !__builtin_sub_overflow(a.i, b.i, &to->i);
    case MUL: return !__builtin_mul_overflow(a.i, b.i, &to->i);
    case FLOORDIV: return divide(a.i, b.i, &to->i, &other);
    case MOD: to->i = 0; return b.i == -1 || divide(a.i, b.i, &other, &to->i); /* by -1 the quotient may be too large */
    case NEG: return !__builtin_sub_overflow((int64_t)0, a.i, &to->i);
    case FADD: to->d = a.d + b.d; return 1;
    case FSUB: to->d = a.d - b.d; return 1;
    case FMUL: to->d = a.d * b.d; return 1;
    case FDIV: to->d = b.d == 0 ? 0 : a.d / b.d; return b.d != 0;
    case FNEG: to->d = -a.d; return 1;
    case CEIL: return rounded(__builtin_ceil(a.d), &to->i);
    case FLOOR: return rounded(__builtin_floor(a.d), &to->i);
    case FLOAT: to->d = (double)a.i; return a.i >= -(1LL << 53) && a.i <= 1LL << 53;
    case MAX: to->i = a.i > b.i ? a.i : b.i; return 1;
    case POSITIVE: to->i = a.i; return a.i > 0;
    case NONZERO: to->i = a.i; return a.i != 0;
    case ZERO: to->i = a.i; return a.i == 0;
    }
    return 0;
}

/* Converts as a launcher does. 0: the number doesn't fit. */
static int convert(Py_ssize_t type, int is_float, Number from, uint64_t *to) {
    static const int64_t lowest[] = {INT8_MIN, INT16_MIN, INT32_MIN, INT64_MIN, 0, 0, 0, 0};
    static const int64_t highest[] = {INT8_MAX,  INT16_MAX,  INT32_MAX,  INT64_MAX,
                                      UINT8_MAX, UINT16_MAX, UINT32_MAX, INT64_MAX};
    *to = 0;
    if (type == F32 || type == F64) {
        double value = is_float ? from.d : (double)from.i;
        float narrow = (float)value;
        memcpy(to, type == F32 ? (void *)&narrow : (void *)&value, size_of_word(type));
        return 1;
    }
    if (is_float || from.i < lowest[type] || from.i > highest[type]) return 0;
    memcpy(to, &from.i, size_of_word(type));
    return 1;
}

int program_run(const Program *self, PyObject *inputs, const Word *words, size_t count, uint64_t *value) {
    Number few[128], *at = few;
    Py_ssize_t known = self->inputs + self->constants, registers = known + self->steps;
    int code = 0;
    if (registers > (Py_ssize_t)(sizeof few / sizeof *few) && !(at = PyMem_Malloc((size_t)registers * sizeof *at))) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(at, self->start, (size_t)known * sizeof *at);
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        PyObject *item = PyList_GET_ITEM(inputs, self->position[i]);
        int overflow = 0;
        if (self->is_float[i] ? !PyFloat_CheckExact(item) : !PyLong_CheckExact(item)) goto done;
        if (self->is_float[i])
            at[i].d = PyFloat_AS_DOUBLE(item);
        else
            at[i].i = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow) goto done;
    }
    for (Py_ssize_t i = 0; i < self->steps; i++)
        if (!compute(&self->step[i], at, &at[known + i])) goto done;
    for (Py_ssize_t i = 0; i < self->results; i++) {
        Py_ssize_t from = self->result[i];
        if ((size_t)i >= count)
            value[i] = (uint64_t)at[from].i;
        else if (!convert(words[i].type, self->is_float[from], at[from], &value[i]))
            goto done;
    }
    code = 1;
done:
    if (at != few) PyMem_Free(at);
    return code;
}
