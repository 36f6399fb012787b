"""Output that must match a grammar: grammars compiled, and a mask of allowed tokens for each next one.

`llguidance` does both, and only in processes of its own: it is native code on what clients send. Theirs are compiler,
grammar_text, masks, mask_server and mask_process; all other modules here run in the scheduler or in front workers, and
import none of those.
"""
