"""A folder in the user's cache that is built once, whole, however many processes ask for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

__all__ = ["build_once", "cache_root", "sha256"]


def cache_root() -> Path:
    """Where packaged models are kept."""
    if own := os.environ.get("SPECDEC_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill `folder`, unless it is there and intact. Whoever else looks sees all of it or nothing, also when several
    processes come at once; a folder that was damaged is replaced. An intact folder may be read-only."""
    if _intact(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if _intact(folder):
            return
        for left in folder.parent.glob(f"{folder.name}.*/"):  # by a process that was killed; nobody else is at work under the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.mkdir()
            build(fresh)
            digests = {file.name: sha256(file) for file in sorted(fresh.iterdir())}
            manifest = fresh / "manifest.json"
            manifest.write_text(json.dumps(digests, indent=1))
            for name in digests:  # safetensors writes for the owner's eyes alone, but a cache may be shared
                (fresh / name).chmod(manifest.stat().st_mode)
            if folder.exists():
                folder.rename(Path(scratch) / "damaged")
            fresh.rename(folder)


def _intact(folder: Path) -> bool:
    """Whether every file is what was written. Hashing 540 MB takes .4 s, and the weights are about to be read in any case."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return all(sha256(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def sha256(path: Path) -> str:
    """The digest of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
