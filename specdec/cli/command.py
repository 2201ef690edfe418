"""What a command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Command", "Failed"]


@dataclass(frozen=True)
class Command:
    """One line of the table of commands."""

    name: str
    help: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]
    """Returns what `--json` prints. What is for people's eyes goes through `args.say`, which is silent under `--json`."""


class Failed(Exception):
    """The command ran, and what it was to show does not hold: the result is printed all the same, and the exit status is 1."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result
