"""A CUDA driver for tests without a GPU that keeps books of memory: reservations, mappings and blocks.

It refuses what the real one refuses: mapping outside of a reservation or twice, access to what is not mapped, freeing
addresses that are still mapped, and any of it while the thread's capture mode is the strict one. It logs each call in a
line.
"""

import ctypes


DRIVER = r"""
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Address;
typedef struct { Address at; size_t size; uint64_t handle; int access; } Span;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Span reserved[4096], mapped[1 << 16];
static size_t block_size[4096];
static int reservations, mappings, block_count, blocks_alive, one_by_one, logging = 1;
static Address next_address = (Address)0x7e0000000000;
static char *text;
static size_t length, capacity, limit;
static Address lowest;
static int no_wishes, littering;
enum { REMAINS = 4096 };
static struct { char name[64]; int skip, code; } failure;
static __thread int mode;

static void say(const char *format, ...) {
    va_list args;
    if (!logging) return;
    if (capacity - length < 4096) text = realloc(text, capacity = capacity * 2 + 8192);
    va_start(args, format);
    length += vsnprintf(text + length, 4095, format, args);
    va_end(args);
    text[length++] = '\n';
    text[length] = 0;
}
static int fails(const char *name) {
    if (strcmp(failure.name, name) || failure.skip-- > 0) return 0;
    failure.name[0] = 0;
    return failure.code;
}
void memory_reset(void) {
    reservations = mappings = block_count = blocks_alive = one_by_one = 0;
    length = limit = lowest = no_wishes = littering = 0;
    logging = 1;
    if (text) *text = 0;
    failure.name[0] = 0;
}
void stub_fail(const char *name, int skip, int code) {
    strcpy(failure.name, name); failure.skip = skip; failure.code = code;
}
void stub_quiet(void) { logging = 0; }
void stub_unmap_one_by_one(void) { one_by_one = 1; }
void stub_reserve_at(Address at) { lowest = at; }
void stub_refuse_wishes(void) { no_wishes = 1; }
void stub_reserve_at_most(size_t size) { limit = size; }
void stub_left(int *out) { out[0] = reservations; out[1] = mappings; out[2] = blocks_alive; }
const char *stub_log(void) { return text ? text : ""; }
void stub_forget(void) { length = 0; if (text) *text = 0; }

/* What a function leaves on the stack, and how often one that is called later finds it there. */
static __attribute__((noinline)) void leave(Address what) {
    volatile Address remains[REMAINS];
    for (int i = 0; i < REMAINS; i++) remains[i] = what;
}
__attribute__((noinline)) int stub_remains(Address low, Address high, size_t step) {
    volatile Address remains[REMAINS];
    int found = 0;
    for (int i = 0; i < REMAINS; i++)  /* the call leaves `low` */
        found += low < remains[i] && remains[i] < high && !((remains[i] - low) % step);
    return found;
}
void stub_litter(void) { littering = 1; }

int cuGetErrorString(int code, const char **out) {
    *out = code == 1 ? "invalid argument" : code == 2 ? "out of memory" : code == 900 ? "not permitted" : NULL;
    return *out ? 0 : 1;
}
int cuThreadExchangeStreamCaptureMode(int *other) { int old = mode; mode = *other; *other = old; return 0; }

#define CALL(name) int code = 0; pthread_mutex_lock(&lock); if (mode != 2) code = 900; else code = fails(#name);
#define DONE pthread_mutex_unlock(&lock); return code;

int cuMemGetAllocationGranularity(size_t *out, const int *kind, int option) {
    CALL(cuMemGetAllocationGranularity)
    if (!code) *out = 2 << 20;
    if (kind[0] != 1 || kind[2] != 1 || option) code = 1;
    DONE
}
int cuMemAddressReserve(Address *out, size_t size, size_t alignment, Address wish, unsigned long long flags) {
    CALL(cuMemAddressReserve)
    if (!code && (limit && size > limit)) code = 2;
    if (!code && (size % (2 << 20) || wish % (2 << 20) || flags || (wish && no_wishes))) code = 1;
    if (!code) {
        *out = lowest ? lowest : next_address;
        if (!lowest) next_address += size + (64 << 20);
        reserved[reservations++] = (Span){*out, size, 0, 0};
        say("reserve %#lx %zu", *out, size);
    }
    DONE
}
int cuMemAddressFree(Address at, size_t size) {
    CALL(cuMemAddressFree)
    int found = -1;
    for (int i = 0; i < reservations; i++) if (reserved[i].at == at && reserved[i].size == size) found = i;
    for (int i = 0; i < mappings; i++) if (mapped[i].at >= at && mapped[i].at < at + size) found = -1;
    if (!code && found < 0) code = 1;
    if (!code) { reserved[found] = reserved[--reservations]; say("unreserve %#lx %zu", at, size); }
    DONE
}
int cuMemCreate(uint64_t *out, size_t size, const int *kind, unsigned long long flags) {
    CALL(cuMemCreate)
    if (!code && (size % (2 << 20) || flags)) code = 1;
    if (!code) {
        block_size[block_count] = size;
        *out = 1000 + block_count++;
        blocks_alive++;
        say("create %lu %zu device %d", *out, size, kind[3]);
    }
    DONE
}
int cuMemRelease(uint64_t handle) { CALL(cuMemRelease) blocks_alive--; say("destroy %lu", handle); DONE }
int cuMemMap(Address at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    CALL(cuMemMap)
    if (littering) leave(at);
    int inside = 0;
    for (int i = 0; i < reservations; i++)
        inside |= at >= reserved[i].at && at + size <= reserved[i].at + reserved[i].size;
    for (int i = 0; i < mappings; i++) if (at < mapped[i].at + mapped[i].size && mapped[i].at < at + size) inside = 0;
    if (!code && (!inside || !size || size % (2 << 20) || at % (2 << 20) || flags
                  || offset)) code = 1;
    if (!code && size != block_size[handle - 1000]) code = 801;  /* as the driver does */
    if (!code) {
        mapped[mappings++] = (Span){at, size, handle, 0};
        say("map %#lx %zu %zu %lu", at, size, offset, handle);
    }
    DONE
}
int cuMemUnmap(Address at, size_t size) {
    CALL(cuMemUnmap)
    size_t found = 0;
    int count = 0;
    for (int i = 0; i < mappings; i++)
        if (mapped[i].at >= at && mapped[i].at + mapped[i].size <= at + size) { found += mapped[i].size; count++; }
    if (!code && (found != size || (one_by_one && count > 1))) code = 1;
    for (int i = 0; !code && i < mappings;)
        if (mapped[i].at >= at && mapped[i].at < at + size) mapped[i] = mapped[--mappings];
        else i++;
    if (!code) say("unmap %#lx %zu", at, size);
    DONE
}
int cuMemSetAccess(Address at, size_t size, const int *access, size_t count) {
    CALL(cuMemSetAccess)
    size_t found = 0;
    for (int i = 0; i < mappings; i++)
        if (mapped[i].at >= at && mapped[i].at + mapped[i].size <= at + size) found += mapped[i].size;
    if (!code && (found != size || count != 1 || access[0] != 1 || access[2] != 3)) code = 1;
    if (!code) say("access %#lx %zu device %d", at, size, access[1]);
    DONE
}
"""


class Driver:
    """Such a driver, from the tests' side."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.library.stub_log.restype = ctypes.c_char_p
        self.library.stub_reserve_at_most.argtypes = [ctypes.c_size_t]
        self.library.stub_remains.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]

    def fail(self, name: str, code: int, skip: int = 0) -> None:
        """The call after `skip` more calls of this name fails, once."""
        self.library.stub_fail(name.encode(), skip, code)

    def calls(self, kind: str | None = None) -> list[list[str]]:
        lines = [line.split() for line in self.library.stub_log().decode().splitlines()]
        return lines if kind is None else [line[1:] for line in lines if line[0] == kind]

    def take(self) -> list[list[str]]:
        lines = self.calls()
        self.library.stub_forget()
        return lines

    def left(self) -> tuple[int, int, int]:
        """Reservations, mappings, blocks."""
        out = (ctypes.c_int * 3)()
        self.library.stub_left(out)
        return tuple(out)  # type: ignore[return-value]
