"""Errors that the command line prints as one line: what was wrong, what was expected and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UndriftError(Exception):
    """An error that the user can correct."""

    ends_with_log = False  # whether the message goes on after its first line


class UnknownName(UndriftError):
    """A name that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        spelled = {each.lower(): each for each in names}
        close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
        hint = f"did you mean {spelled[close[0]]!r}?" if close else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)  # across processes the message is enough


class BadSetting(UndriftError):
    """A setting whose value is not allowed, alone or together with another setting."""


class MissingData(UndriftError):
    """A data set whose files are missing."""


class BadData(UndriftError):
    """Files or arrays with invalid content."""


class BadRunFolder(UndriftError):
    """A run folder that holds another run or a damaged one."""


class CannotWrite(UndriftError):
    """A run's folder that can no longer be written: full, read-only, removed or taken by another run."""


class OtherRankFailed(UndriftError):
    """Another process of the same run reported an error."""


class LostRank(UndriftError):
    """Another process of the same run stopped answering."""


class ClientFailed(UndriftError):
    """An exception of an algorithm, a model or a loss, with the stage and, if known, the client."""

    def __init__(self, stage: str, error: Exception, client: int | None = None) -> None:
        self.stage, self.error, self.client = stage, error, client
        who = "a client" if client is None else f"client {client}"
        super().__init__(f"{who}, {stage}: {type(error).__name__}: {error}")

    def of(self, client: int) -> ClientFailed:
        """The same error with the client's number."""
        return ClientFailed(self.stage, self.error, client)

    def __reduce__(self) -> tuple[type[UndriftError], tuple[str]]:
        return UndriftError, (str(self),)
