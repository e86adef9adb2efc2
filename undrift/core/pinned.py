"""Models by path, hf:PATH: which files are there, and a checksum by which a run knows them again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from undrift.core.errors import BadSetting

PREFIX = "hf:"
SHOWN = 16  # characters of a checksum


def pin(spec: str) -> str:
    """hf:PATH with the checksum of what is there; other names, and a path that has one or leads nowhere, as they are."""
    if not spec.startswith(PREFIX) or "#" in spec or not Path(spec.removeprefix(PREFIX)).expanduser().exists():
        return spec
    return f"{spec}#{checksum(files(spec.removeprefix(PREFIX)))}"


def files(path: str) -> list[Path]:
    """The config, and the weights beside it if the path is a folder."""
    at = Path(path).expanduser()
    found = [at / "config.json", *sorted(at.glob("*.safetensors"))] if at.is_dir() else [at]
    if not path or not found[0].is_file():
        raise BadSetting(
            f"there is no {found[0] if path else 'path'} for --model hf:{path}; give a config.json of transformers, or a "
            "folder with one and its weights (*.safetensors), on this machine"
        )
    if at.is_dir() and len(found) == 1:
        raise BadSetting(
            f"{at} has no weights (*.safetensors); give hf:{at / 'config.json'} to draw them from the seed"
        )
    return found


def checksum(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()[:SHOWN]
