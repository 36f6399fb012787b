"""Errors of loading a model, from `runner_svc.model.folder.errors`, which the readers of folders raise too."""

from runner_svc.model.folder.errors import BrokenModel, ModelNotFound, UnsupportedModel

__all__ = ["BrokenModel", "ModelNotFound", "UnsupportedModel"]
