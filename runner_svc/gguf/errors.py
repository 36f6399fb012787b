"""What can be wrong with a GGUF file."""


class GgufError(ValueError):
    """The file can't be served; the message is a sentence without the file's name, such as "It has no tensors."."""
