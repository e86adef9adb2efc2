"""What was probably meant by an argument that a command does not take, or where it belongs."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

from undrift.core.errors import MEANT, BadSetting, UndriftError, closest, plain
from undrift.core.names import methods_with, names
from undrift.deploy.settings import RENAMED
from undrift.jobs.config import SKEW

# Flags of other programs that say where to compute.
DEVICES = dict.fromkeys(("gpu", "gpus", "ngpus", "cuda", "usecuda"), "cuda") | dict.fromkeys(("cpu", "nocuda"), "cpu")


def unknown_argument(command: str, word: str, parsers: Mapping[str, argparse.ArgumentParser]) -> UndriftError:
    """The error for an argument that a command does not take; `parsers` are those of all commands."""
    flag, flags = word.split("=")[0], flags_of(parsers[command])
    field, best = flag.lstrip("-").replace("-", "_"), closest(flag, flags)
    lacks = f"'undrift {command}' has no {flag}"
    if field in RENAMED:
        return BadSetting(f"--{field} is called --{RENAMED[field]} now".replace("_", "-"))
    if not word.startswith("-") and "=" in word:
        return without_dashes(word, flags)
    if best and (plain(best) == plain(flag) or plain(flag) in MEANT):
        return BadSetting(f"{lacks}; did you mean '{best}'?")
    if flag == "--config" and "--resume" in flags:
        return BadSetting(f"{lacks}; give the file alone: 'undrift {command} FILE.toml'")
    if command in ("sweep", "tune") and flag in (*flags_of(parsers["run"]), "--seeds"):
        return BadSetting(f"{lacks}: its settings stand in the file; 'undrift suites copy demo' gives one to change")
    if "--track" in flags and field in names("trackers"):
        return BadSetting(f"{lacks}; give --track {field}")
    if "--device" in flags and plain(flag) in DEVICES:
        return BadSetting(f"{lacks}; give --device {DEVICES[plain(flag)]}")
    if "--algorithm" in flags and methods_with(field):
        skew = SKEW if field == "alpha" else ""
        return BadSetting(f"{field} is a field of algorithms: give --set {field}=VALUE{skew}")
    others = dict.fromkeys(parser.prog for parser in parsers.values() if flag in flags_of(parser))
    meant = f"; did you mean '{best}'?" if best else ""
    if word.startswith("-") and others:
        commands = ", ".join(f"'{other}'" for other in others)
        return BadSetting(f"{lacks}{meant or ';'} {flag if meant else 'it'} is an argument of {commands}")
    if best:
        return BadSetting(f"{lacks}{meant}")
    what = lacks if word.startswith("-") else f"'undrift {command}' does not take {word!r}"
    return BadSetting(f"{what}; try 'undrift {command} --help'")


def without_dashes(word: str, flags: Collection[str]) -> UndriftError:
    """The error for NAME=VALUE, as Hydra takes it."""
    name, _, value = word.partition("=")
    field = name.lstrip("+~").rpartition(".")[2]
    flag = f"--{field.replace('_', '-')}"
    if flag not in flags and not methods_with(field):
        flag = closest(flag, flags)
        if not flag:
            return BadSetting(f"settings are flags here, and none is called {field}; 'undrift run --help' lists them")
    right = f"{flag} {value}" if flag in flags else f"--set {field}={value}"
    return BadSetting(f"settings are flags here: write {right}, not {word}")


def missing_file(file: str, flags: Collection[str], resume: bool) -> UndriftError | None:
    """The error for a file of settings that is not there, where something else was probably meant."""
    if "=" in file:
        return without_dashes(file, flags)
    if resume:
        return BadSetting(f"there is no file {file}; to go on with a run give its folder: --out DIR --resume")
    if "--algorithm" in flags and file in names("algorithms"):
        return BadSetting(f"there is no file {file}; write --algorithm {file}")
    return None


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]
