"""Drawn text of speaking roles with words of their own and a common grammar: synthetic-text(roles=20, length=32, own=0.7).

A line is a sentence: subject, verb, object, each a noun with an article and sometimes an adjective. All roles share grammar and
words, but each draws words with frequencies of its own; `own` in [0, 1] says how far these are from the common ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undrift.core.errors import BadSetting
from undrift.data._text import dataset_of_writers
from undrift.data.dataset import Dataset

STREAM = 0x7E87
SYLLABLES = ("ba", "ko", "li", "mu", "ne", "po", "ra", "si", "tu", "ve", "zo", "hin", "dar", "mel", "sto")
WORDS = {"noun": 60, "verb": 40, "adjective": 30}


def load(
    root: Path | None, roles: int = 20, lines: int = 60, length: int = 32, own: float = 0.7, seed: int = 0
) -> Dataset:
    """`lines` per role in the mean; roles differ in how much they say."""
    if roles < 1 or lines < 10 or not 0.0 <= own <= 1.0:
        raise BadSetting(f"synthetic-text needs roles >= 1, lines >= 10 and own in [0, 1], not {roles}, {lines}, {own}")
    common = np.random.Generator(np.random.PCG64([seed, STREAM]))
    words = {kind: [draw_word(common, kind) for _ in range(count)] for kind, count in WORDS.items()}
    usual = {kind: 1.0 / np.arange(1, count + 1) for kind, count in WORDS.items()}
    writers = {}
    for role in range(roles):  # its habits depend on its number alone, so that adding roles changes no earlier one
        random = np.random.Generator(np.random.PCG64([seed, STREAM, role]))
        share = {}
        for kind, frequencies in usual.items():
            mixed = (1 - own) * frequencies + own * random.permutation(frequencies)
            share[kind] = mixed / mixed.sum()
        count = max(10, round(lines * float(np.exp(random.normal(-0.125, 0.5)))))

        def word(kind: str, random: np.random.Generator = random, share: dict[str, np.ndarray] = share) -> str:
            return words[kind][int(random.choice(len(words[kind]), p=share[kind]))]

        def phrase(random: np.random.Generator = random) -> str:
            adjective = f"{word('adjective')} " if random.random() < 0.4 else ""
            return f"the {adjective}{word('noun')}"

        writers[f"ROLE {role + 1:03}"] = [f"{phrase()} {word('verb')} {phrase()}." for _ in range(count)]
    return dataset_of_writers("synthetic-text", writers, length, 0)


def draw_word(random: np.random.Generator, kind: str) -> str:
    """Two or three syllables, with an ending that tells its kind."""
    stem = "".join(SYLLABLES[int(random.integers(len(SYLLABLES)))] for _ in range(int(random.integers(1, 3))))
    return stem + {"noun": "n", "verb": "eth", "adjective": "ly"}[kind]
