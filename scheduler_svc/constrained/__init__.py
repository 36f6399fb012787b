"""Constrained output: compiles grammars, and makes a mask of the allowed tokens for each next token.

`llguidance` does both. It is native code that processes client input, so it runs only in processes of its own, whose
modules are in `process/`. All other modules, and `process/structural_tag`, run in the scheduler or in front workers and
do not import it.
"""
