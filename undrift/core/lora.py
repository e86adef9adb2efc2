"""The setting --lora: which adapters a model gets."""

from __future__ import annotations

from typing import Any, NamedTuple

from undrift.core.errors import BadSetting, UnknownName


class Lora(NamedTuple):
    """LoRA with rank r: each chosen layer W becomes W + alpha / r · B A, of which A and B are trained."""

    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # layers, by name or its end; (): those that peft knows for the model
    train: tuple[str, ...] = ()  # further modules that are trained whole; (): the head of a model for classification


def parse_lora(text: str) -> Lora | None:
    """Parse --lora.

    >>> parse_lora("r=4,alpha=16,targets=q_proj+v_proj")
    Lora(r=4, alpha=16.0, dropout=0.0, targets=('q_proj', 'v_proj'), train=())
    >>> parse_lora("")
    """
    if not text.strip():
        return None
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise BadSetting(f"lora {part.strip()!r} is not NAME=VALUE; write r=8,alpha=16,targets=q_proj+v_proj")
        if name not in Lora._fields:
            raise UnknownName("part of lora", name, Lora._fields)
        try:
            kind = type(getattr(Lora(), name))
            given[name] = tuple(filter(None, value.split("+"))) if kind is tuple else kind(value)
        except ValueError:
            raise BadSetting(f"lora {name} must be a number, not {value!r}") from None
    found = Lora(**given)
    if not (found.r >= 1 and 0 < found.alpha < 1e6 and 0 <= found.dropout < 1):
        raise BadSetting(f"lora needs r >= 1, alpha above 0 and dropout in [0, 1), not {text!r}")
    return found
