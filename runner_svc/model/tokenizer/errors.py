"""What can be wrong with a model's tokenizer files."""


class UnusableTokenizer(ValueError):
    """The tokenizer can't be served as its files describe it. The message names the file and the key."""


class MissingTokenizer(UnusableTokenizer):
    """The folder has no tokenizer. The message lists the files that may hold one."""
