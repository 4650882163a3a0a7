/* Clears what calls leave on the stack.

   Note [Remains on the stack]
   A launcher passes on what the unused fields of its structures hold: what lay on the stack. Two captures of a region
   leave the same there, with one exception, due to our own allocator: it maps a block when the mapped part of a range
   is full, which happens at another allocation where the gaps are wider, and the driver's functions leave the addresses
   of the blocks on the stack. These are in the range and stand for different bytes in each capture. So the allocator
   clears the stack below, as deep as the driver goes where it has mapped a block; it is also cleared when a capture
   begins. */

#include "module.h"
#include "stack.h"

#include <pthread.h>

#define DEEP ((size_t)256 << 10)

void clear_stack(size_t most) {
    static __thread uintptr_t end;
    size_t room;
    void *cleared;
    if (!end) {
        pthread_attr_t attributes;
        size_t size;
        end = UINTPTR_MAX; /* not known */
        if (!pthread_getattr_np(pthread_self(), &attributes)) {
            if (!pthread_attr_getstack(&attributes, &cleared, &size)) end = (uintptr_t)cleared;
            pthread_attr_destroy(&attributes);
        }
    }
    room = (uintptr_t)&room > end ? ((uintptr_t)&room - end) / 2 : 0; /* a thread's stack may be small */
    if (room > most) room = most;
    cleared = memset(__builtin_alloca(room + 1), 0, room);
    __asm__ volatile("" : : "r"(cleared) : "memory"); /* keeps the memset, whose result nobody reads */
}

static PyObject *py_clear_stack(PyObject *module, PyObject *unused) {
    clear_stack(DEEP);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"clear_stack", py_clear_stack, METH_NOARGS, "clear_stack(): zeros where what is called next has its stack"},
    {NULL}};

PART(.module = "relaunch", .methods = methods)
