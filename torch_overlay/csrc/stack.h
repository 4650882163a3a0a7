/* Clears what calls leave on the stack. */

#pragma once

#include <stddef.h>

/* Zeroes the stack that this thread's next calls will use: so many bytes, or half of what the thread has left. */
void clear_stack(size_t most);
