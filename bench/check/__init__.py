"""The regression gate: instructions of fixed pieces of work, counted by valgrind, against stored counts."""
