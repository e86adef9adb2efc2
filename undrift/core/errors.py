"""What can go wrong at the border, said so that the reader knows what to do next.

Every message says what was wrong, what was expected and what to try; the command line prints it as one line
and exits with code 2. The maths inside the package assumes valid input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UndriftError(Exception):
    """Anything the user can put right."""


class UnknownName(UndriftError):
    """A name that nothing is registered under."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        spelled = {each.lower(): each for each in names}
        close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
        hint = f"did you mean {spelled[close[0]]!r}?" if close else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)  # across processes the message is enough


class BadSetting(UndriftError):
    """A value outside what the setting allows, alone or together with another setting."""


class MissingData(UndriftError):
    """A data set whose files are not there."""


class BadData(UndriftError):
    """Files or arrays that are there but cannot be what they should be."""


class BadRunFolder(UndriftError):
    """A run folder that holds another run, or a damaged one."""


class OtherRankFailed(UndriftError):
    """Another process of the same run failed and said why."""


class LostRank(UndriftError):
    """Another process of the same run is gone."""


class ClientFailed(UndriftError):
    """What an algorithm, a model or a loss raised while a client worked, with the stage and, where it is known, the client."""

    def __init__(self, stage: str, error: Exception, client: int | None = None) -> None:
        self.stage, self.error, self.client = stage, error, client
        who = "a client" if client is None else f"client {client}"
        super().__init__(f"{who}, {stage}: {type(error).__name__}: {error}")

    def of(self, client: int) -> ClientFailed:
        """The same of a client that is known."""
        return ClientFailed(self.stage, self.error, client)

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)
