"""What can be wrong with a model: `runner_svc.model.folder.errors`, which the folder's readers raise too."""

from runner_svc.model.folder.errors import BrokenModel, ModelNotFound, UnsupportedModel

__all__ = ["BrokenModel", "ModelNotFound", "UnsupportedModel"]
