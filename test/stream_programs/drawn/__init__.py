"""Random stream programs: drawn as data (`steps`), written so that they can't race in eager (`writer`, `order`)."""
