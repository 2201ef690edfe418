"""Acceptors and drafters by name: the library's, or a class of a reader's own as `module:Class`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from .. import acceptors, drafters
from ..base import Acceptor

__all__ = ["ACCEPTORS", "DRAFTERS", "part"]

ACCEPTORS = {name: getattr(acceptors, name) for name in acceptors.__all__}
DRAFTERS = {name: make for name, make in vars(drafters).items() if name in drafters.__all__ and inspect.isclass(make)}


def part(name: str, known: Mapping[str, Any], base: type, flag: str) -> Any:
    """A part of the library or of a reader's own module, made without arguments."""
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in known:
            raise ValueError(f"{flag}: {name} unknown; allowed are {', '.join(known)}, or module:Class")
        make = known[name]
    else:
        make = _imported(module, attribute, flag)
    if not inspect.isclass(make) or not issubclass(make, base):
        raise ValueError(f"{flag}: {name} is {make!r}; give a subclass of specdec.base.{base.__name__}")
    try:
        found: Any = make()
    except TypeError as error:
        wanted = "name a class that defines every abstract method and whose __init__ takes no arguments"
        raise ValueError(f"{flag}: {name} cannot be made ({error}); {wanted}") from error
    if base is Acceptor:
        try:
            _ = found.lossless, found.takes
        except AttributeError as error:
            raise ValueError(f"{flag}: {name}: {error}; set lossless and takes on the class, see specdec.base.Acceptor") from error
        if not isinstance(found.takes, frozenset) or not found.takes or not isinstance(found.lossless, bool):
            given = f"{found.takes!r} and {found.lossless!r}"
            raise ValueError(f"{flag}: {name}: takes must be a frozenset with a specdec.Kind in it, lossless True or False; got {given}")
    return found


def _imported(module: str, attribute: str, flag: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)  # an installed command does not look into the current folder by itself
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{flag}: cannot import {module!r} from {here} ({error}); give module:Class, without .py") from error
    finally:
        sys.path.remove(here)
    if attribute not in vars(found):
        classes = [name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == found.__name__]
        raise ValueError(f"{flag}: {module} has no {attribute}; its classes are {', '.join(classes) or 'none'}")
    return vars(found)[attribute]
