"""What can be wrong with a model that a runner is told to serve."""


class UnsupportedModel(ValueError):
    """The model can't be served; the message says why and what is supported."""


class ModelNotFound(ValueError):
    """No model under that name; the message says where it was looked for."""
