#include "room.h"

#include <string.h>

void open_room(Room *self, size_t bytes) {
    self->hole[0] = (Hole){0, bytes};
    self->holes = bytes > 0;
}

static void remove_hole(Room *self, int i) {
    memmove(&self->hole[i], &self->hole[i + 1], (size_t)(--self->holes - i) * sizeof *self->hole);
}

int take_part(Room *self, size_t bytes, Hole *part) {
    bytes = (bytes + PART - 1) / PART * PART;
    for (int i = 0; i < self->holes; i++) {
        Hole *hole = &self->hole[i];
        if (hole->end - hole->begin < bytes) continue;
        *part = (Hole){hole->begin, hole->begin + bytes};
        hole->begin = part->end;
        if (hole->begin == hole->end) remove_hole(self, i);
        return 1;
    }
    return 0;
}

void give_part(Room *self, Hole part) {
    int i = 0;
    while (i < self->holes && self->hole[i].begin < part.begin) i++;
    if (i && self->hole[i - 1].end == part.begin) {
        self->hole[--i].end = part.end;
    } else if (i < self->holes && self->hole[i].begin == part.end) {
        self->hole[i].begin = part.begin;
        return;
    } else if (self->holes < MOST_HOLES) {
        memmove(&self->hole[i + 1], &self->hole[i], (size_t)(self->holes++ - i) * sizeof *self->hole);
        self->hole[i] = part;
    } else
        return; /* it isn't taken again in this run */
    if (i + 1 < self->holes && self->hole[i + 1].begin == self->hole[i].end) {
        self->hole[i].end = self->hole[i + 1].end;
        remove_hole(self, i + 1);
    }
}
