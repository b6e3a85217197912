"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from moecore.packing.corpus.files import shorten_text

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
UNUSED_FILES = ("original/*", "metal/*", "*.pth", "*.gguf", "*.onnx")  # weights in other formats


def model_directory(path: Path, option: str = "--model") -> Path:
    """Return a directory as it is, and of a name of the hub the directory in the cache.

    The first process of a host downloads what the cache lacks. Other processes wait for it.

    Raises:
        ValueError: for a name that is neither in the cache nor can be downloaded.
    """
    if path.exists() or not HUB_ID.fullmatch(str(path)):
        return path
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import WeakFileLock

    name, cache = str(path), Path(hub.constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f".{name.replace('/', '--')}.lock"):
            try:
                location = hub.snapshot_download(
                    name, local_files_only=True, ignore_patterns=[*UNUSED_FILES]
                )
            except LocalEntryNotFoundError:
                location = hub.snapshot_download(name, ignore_patterns=[*UNUSED_FILES])
    except Exception as error:  # of any kind, of networks and of the hub
        raise ValueError(
            f"{option} ({name}) must be a directory, or a model of the hub that is in the cache "
            f"({cache}) or can be downloaded: {shorten_text(error)}"
        ) from None
    return Path(location)
