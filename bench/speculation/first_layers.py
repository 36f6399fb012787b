"""Writes a model's first layers as a model: `python -m bench.speculation.first_layers FOLDER 20 [--model smollm2]`.

It is a draft model with the tokens of the whole one, for measurements where no smaller model of the family is at hand.
Nothing was trained, so it agrees less than a model of its size would.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner_svc.catalog.source import model_folder
from runner_svc.settings.runner_settings import default_cache_folder

_KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_LAYERS = "num_hidden_layers"


def write_first_layers(source: Path, target: Path, count: int) -> None:
    """Writes the folder `target` with the first `count` layers of the plain model in `source`.

    Raises ValueError if the model has no more layers.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not 0 < count < config[_LAYERS]:
        raise ValueError(f"the model has {config[_LAYERS]} layers: name fewer, and at least 1")
    kept: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                _, found, rest = name.partition(".layers.")
                if not found or int(rest.partition(".")[0]) < count:
                    kept[name] = tensors.get_tensor(name)
    target.mkdir(parents=True)
    config[_LAYERS] = count
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in _KEPT:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is written")
    parser.add_argument("layers", type=int, help="number of layers that are kept")
    parser.add_argument("--model", default="smollm2", help="as the runner's setting")
    options = parser.parse_args()
    source = model_folder(options.model, default_cache_folder(), lambda what, share: None)
    write_first_layers(source, options.folder, options.layers)


if __name__ == "__main__":
    main()
