"""Errors of loading a model."""


class UnsupportedModel(ValueError):
    """The model can't be served; the message says why and what is supported."""


class ModelNotFound(ValueError):
    """There is no model of that name, or a file of it is missing; the message says which and what to give."""
