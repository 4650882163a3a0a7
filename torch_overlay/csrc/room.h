/* Memory that one run takes parts of, and gives them back: the first hole that is large enough. */

#pragma once

#include <stddef.h>

enum { MOST_HOLES = 64, PART = 512 }; /* PART: what sizes are rounded up to, as torch's allocator does it */

typedef struct {
    size_t begin, end;
} Hole;

typedef struct {
    Hole hole[MOST_HOLES];
    int holes; /* in order, none beside another one */
} Room;

void open_room(Room *self, size_t bytes);
/* Returns 1 if there is a hole, of which `part` is as much as is needed, at least. */
int take_part(Room *self, size_t bytes, Hole *part);
void give_part(Room *self, Hole part);
