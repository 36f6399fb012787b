"""What can be wrong with a model that a runner has to serve."""


class UnsupportedModel(ValueError):
    """The model can't be served; the message says why and what is supported."""


class ModelNotFound(ValueError):
    """No model under that name; the message says where it was looked for."""


class BrokenModel(UnsupportedModel):
    """A file of the model is broken, or says what it can't: no decoder serves it."""
