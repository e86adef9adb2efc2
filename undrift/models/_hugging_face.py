"""Models of transformers: hf:CONFIG.json draws one from the seed, hf:FOLDER reads one with its weights (safetensors).

Nothing is downloaded, and no code is run but that of transformers itself: a config names one of its classes, and the data say
which head it gets. hf:PATH#SUM is refused where the files at the path have another checksum.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.pinned import PREFIX, checksum, files

CODE = ("auto_map", "custom_pipelines")  # what would name code outside transformers


def library(name: str) -> Any:
    """transformers or peft."""
    try:
        return import_module(name)
    except ImportError as error:
        raise BadSetting(f"this needs {name} ({error}); pip install 'undrift[hf]'") from error


def build(spec: str, shape: tuple[int, ...], classes: int, positions: int) -> nn.Module:
    """The model for inputs of this shape; `positions`: the number of dimensions of one target, 0 for a label."""
    path, _, expected = spec.removeprefix(PREFIX).partition("#")
    found = files(path)
    if expected and (now := checksum(found)) != expected:
        raise BadSetting(f"{path} is not what this run began with: its checksum is {now}, not {expected}")
    transformers = library("transformers")
    config = read_config(transformers, found[0])
    head = head_for(shape, positions)
    if head == "CausalLM":
        check_words(config, classes, shape)
    else:
        config.num_labels = classes
    config.use_cache = False
    auto = getattr(transformers, f"AutoModelFor{head}")
    if type(config) not in auto._model_mapping:
        raise BadSetting(
            f"transformers has no {config.model_type} with the head that these data need ({head}): inputs {list(shape)}, "
            f"{'a label for each position' if positions else 'one label each'}"
        )
    if len(found) == 1:
        module = auto.from_config(config, trust_remote_code=False, dtype="float32")
    else:
        module = auto.from_pretrained(
            found[0].parent, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            dtype="float32",
        )  # fmt: skip
    made: nn.Module = module.train()
    return made


def read_config(transformers: Any, path: Path) -> Any:
    """The config of one of transformers' own models."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadSetting(f"{path} is no config.json of transformers: {type(error).__name__}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    known = transformers.CONFIG_MAPPING
    if kind is None:
        raise BadSetting(
            f"{path} names no model_type, such as gpt2, llama, bert or vit; give a config.json of transformers"
        )
    if kind not in known:
        raise UnknownName("model_type", str(kind), list(known.keys()))
    try:
        return known[kind].from_dict({name: value for name, value in raw.items() if name not in CODE})
    except Exception as error:  # whatever a config of that kind raises
        raise BadSetting(f"{path} is no config of {kind}: {' '.join(str(error).split())}") from error


def head_for(shape: tuple[int, ...], positions: int) -> str:
    """What the model is to say: a label of a picture, a label of a text, or each next token."""
    if len(shape) == 3 and not positions:
        return "ImageClassification"
    if len(shape) == 1 and positions <= 1:
        return "CausalLM" if positions else "SequenceClassification"
    raise BadSetting(
        f"--model hf: takes pictures [channels, height, width] or texts [tokens] with a label each, or texts with a label "
        f"for each token, not inputs {list(shape)} with targets of {positions} dimensions"
    )


def predicts_next(module: nn.Module) -> bool:
    """Whether this is one of transformers' models that predict each next token, also with adapters."""
    kinds = [type(part) for part in module.modules()]
    return any(
        kind.__module__.startswith("transformers.") and kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))
        for kind in kinds
    )


def check_words(config: Any, classes: int, shape: tuple[int, ...]) -> None:
    """Raise BadSetting unless the model has room for the data's tokens."""
    text = config.get_text_config()
    if text.vocab_size < classes:
        raise BadSetting(f"the data have {classes} tokens, but the config's vocab_size is {text.vocab_size}; raise it")
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and most < shape[0]:
        raise BadSetting(f"the texts have {shape[0]} tokens, but the config has places for {most}; raise that")
