"""One short file a family: a table, and what it states differently from the base it builds on."""
