"""Output that must match a grammar: grammars compiled, and a mask of allowed tokens for each next one.

`llguidance` does both, in threads of the engine's process: it releases the interpreter while it works, tokens and masks
cross no process boundary, and the step never waits for either. Front workers compile a grammar once more to refuse what
can't be used before the engine hears of it.
"""
