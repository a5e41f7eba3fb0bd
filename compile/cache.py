"""The disk cache of traced and compiled forwards: one folder an entry, named by a hash of all that shapes it.

    python -m vllm_triton.compile.cache            lists it
    python -m vllm_triton.compile.cache --clear    empties it

An entry appears at once, under its name, when it is whole: processes that build the same one at the same time each
write a folder of their own, and the first to rename it wins. A manifest holds the hash of every file; an entry that
does not match it is built again, with a warning. Kernels have Triton's own cache and are not in here.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_triton import envs

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_UNFINISHED = "unfinished-"
_ABANDONED_AFTER = 3600.0  # seconds after which nobody is still writing an unfinished entry


def hash_of(factors: Mapping[str, Any]) -> str:
    """The key of an entry that these factors shape: JSON values by name."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def hash_of_files(*paths: Path) -> str:
    """Of Python sources: of files, and of all below folders."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(path.parent)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


class CompileCache:
    """Args: root: its folder, which is made when the first entry is; None for the user's own."""

    def __init__(self, root: Path | None = None):
        self.root = root or envs.cache_folder() / "forwards"

    def find(self, key: str) -> Path | None:
        """The folder of a whole entry, or None. One that is damaged is thrown away, with a warning."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        try:
            expected = json.loads((folder / _MANIFEST).read_text())["files"]
            for name, digest in expected.items():
                if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                    raise ValueError(f"{name} does not match its hash")
        except PermissionError as error:
            logger.warning("compile cache: entry %s cannot be read: %s", folder, error)
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.discard(key, error)
            return None
        return folder

    def discard(self, key: str, reason: object) -> None:
        """Throws an entry away that cannot be used."""
        logger.warning("compile cache: entry %s is damaged and will be built again: %s", self.root / key, reason)
        aside = self.root / f"{_UNFINISHED}damaged-{os.getpid()}-{key}"
        with contextlib.suppress(OSError):  # another process has thrown it away
            os.rename(self.root / key, aside)
        shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def build(self, key: str, description: Mapping[str, Any]) -> Iterator[Path]:
        """A folder to write the files of an entry into; it becomes the entry at the end of the block.

        Where a file or the cache's folder cannot be written, a warning says so, and nothing is kept.

        Args:
            description: for the list of entries.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._remove_abandoned()
                folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            except OSError as error:
                logger.warning("compile cache: nothing is kept, since its folder cannot be written: %s", error)
                yield Path(stack.enter_context(tempfile.TemporaryDirectory()))
                return
            try:
                yield folder
                self._finish(folder, key, description)
            except OSError as error:
                logger.warning("compile cache: entry %s could not be kept: %s", key, error)

    def _finish(self, folder: Path, key: str, description: Mapping[str, Any]) -> None:
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
        manifest = {"description": description, "created": time.time(), "files": files}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        try:
            os.rename(folder, self.root / key)
        except OSError:
            if not (self.root / key).is_dir():  # else another process was first
                raise

    def entries(self) -> list[dict[str, Any]]:
        """Newest first: {"key", "created" (seconds since 1970), "bytes", "description"}."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError, KeyError):
                manifest = json.loads((folder / _MANIFEST).read_text())
                size = sum(path.stat().st_size for path in folder.iterdir())
                entry = {"key": folder.name, "created": manifest["created"], "bytes": size}
                found.append(entry | {"description": manifest["description"]})
        return sorted(found, key=lambda entry: -entry["created"])

    def clear(self) -> int:
        """Removes all entries; what another process is writing now stays. Returns how many."""
        self._remove_abandoned()
        folders = [folder for folder in self._folders() if not folder.name.startswith(_UNFINISHED)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return len(folders)

    def _remove_abandoned(self) -> None:
        """What processes left that ended before they had finished it."""
        for folder in self._folders():
            with contextlib.suppress(OSError):  # it has just been finished
                if folder.name.startswith(_UNFINISHED) and time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_triton.compile.cache", description="Compiled forwards.")
    parser.add_argument("--clear", action="store_true", help="remove all entries")
    parser.add_argument("--json", action="store_true", help="list them as JSON")
    options = parser.parse_args(arguments)
    cache = CompileCache()
    if options.clear:
        print(f"removed {cache.clear()} entries from {cache.root}")
        return 0
    entries = cache.entries()
    if options.json:
        print(json.dumps(entries))
        return 0
    print(f"{len(entries)} entries in {cache.root}")
    for entry in entries:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["created"]))
        words = ", ".join(f"{name} {value}" for name, value in entry["description"].items())
        print(f"{entry['key'][:12]}  {created}  {entry['bytes'] / 1024:8.1f} KiB  {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
