/* How a file adds its functions and types to the extension module. */

#pragma once

#include "read.h"

typedef struct Part {
    const char *module;            /* the module inside of the extension that it fills; several parts may fill one */
    PyMethodDef *methods;          /* or NULL */
    int (*init)(PyObject *module); /* or NULL; returns -1 with a Python error */
    struct Part *next;
} Part;

void add_part(Part *part);

/* PART(.module = ..., .methods = ..., .init = ...) lists the file's part when the library is loaded, as TORCH_LIBRARY
   does it for operators, so no other file names it. */
#define PART(...)                                                                                                      \
    static Part part = {__VA_ARGS__};                                                                                  \
                                                                                                                       \
    __attribute__((constructor)) static void list_part(void) { add_part(&part); }
