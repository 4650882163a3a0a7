/* The numbers of a launch, and the parameters that hold them. */

#pragma once

#include "read.h"

typedef union {
    int64_t i;
    double d;
} Number;

typedef struct {
    Py_ssize_t operation, a, b;
} Step;

/* Computes the values of words from the numbers among the inputs. Registers: inputs, constants, steps. */
typedef struct {
    Py_ssize_t inputs, constants, steps, results, least; /* least: so many inputs a call has at the least */
    Py_ssize_t *position;                                /* of each input */
    unsigned char *is_float;                             /* of each register */
    Number *start;                                       /* the registers before a run: constants are in place */
    Step *step;
    Py_ssize_t *result; /* registers */
} Program;

/* A number slot: a parameter that a launch computes. `held` is what it holds. */
typedef struct {
    unsigned char *where;
    size_t node;
    Py_ssize_t type;
    uint64_t held;
} Word;

enum { I8, I16, I32, I64, U8, U16, U32, U64, F32, F64, TYPES }; /* of words */

size_t size_of_word(Py_ssize_t type);
/* Reads a program into one of zeros. Returns 0, or -1 with an error. */
int program_init(Program *self, Pool *pool, PyObject *numbers);
/* Makes the values of `count` words, then the results after these as integers of 64 bits, in `value`. 1: done. 0: the
   numbers are unfit. -1: an error. */
int program_run(const Program *self, PyObject *inputs, const Word *words, size_t count, uint64_t *value);
