"""Adapters of peft: `--lora r=8,alpha=16` puts LoRA into any model, and freezes the rest of it.

After the run the adapter is saved as peft itself saves it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.core.files import writing
from undrift.core.lora import Lora
from undrift.models._hugging_face import library

HEADS = ("classifier", "score")  # names of the heads of transformers' classifiers


def with_lora(module: nn.Module, lora: Lora) -> nn.Module:
    """The module, changed, with new adapters as its only trainable part, and with the modules in `train` whole."""
    peft = library("peft")
    if isinstance(module, peft.PeftModel):
        raise BadSetting("the model has adapters already; leave lora out")
    linear = [name for name, part in module.named_modules() if type(part).__name__ in ("Linear", "Conv1D")]
    train = list(lora.train) or [name for name in HEADS if hasattr(module, name)]
    given: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    config = peft.LoraConfig(**given, target_modules=list(lora.targets) or None, modules_to_save=train or None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "fan_in_fan_out|.*is_gradient_checkpointing"
            )  # which peft mends by itself
            made: nn.Module = peft.get_peft_model(module, config)
            return made
    except ValueError as error:
        raise BadSetting(
            f"peft finds no place for lora: {' '.join(str(error).split())}; give targets, whole names or their ends, such as "
            f"--lora r={lora.r},targets={'+'.join(endings(linear)) or 'NAME'}"
        ) from error


def endings(names: list[str]) -> list[str]:
    """The different last parts of names, a few of them."""
    return sorted({name.rpartition(".")[2] for name in names} - set(HEADS))[:4]


def has_adapters(module: nn.Module) -> bool:
    """Whether this is a model of peft."""
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def save_adapter(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter with the tensors of a state dict as a checkpoint of peft."""
    made: Any = module
    new = folder.with_name(f".{folder.name}")
    with writing(folder):
        shutil.rmtree(new, ignore_errors=True)
        made.save_pretrained(str(new), state_dict=dict(state), save_embedding_layers=False)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
