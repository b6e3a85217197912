"""Data sets of the package `datasets`: of the hub, of `save_to_disk`, and parquet files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.packing.corpus.files import shorten_text
from moecore.recipes.files import check_directory, named

HUB = "hf:"
DIRECTORY_FILES = ("state.json", "dataset_dict.json")  # of save_to_disk


def is_table(path: str) -> bool:
    """Return whether the package `datasets` reads the path."""
    is_directory = any(os.path.lexists(Path(path) / file) for file in DIRECTORY_FILES)
    return path.startswith(HUB) or path.endswith(".parquet") or is_directory


def load_table(
    path: str, option: str, *, split: str = "train", config: str = "", stream: bool = False
) -> Any:
    """Return a data set of `datasets`.

    Args:
        path: hf:NAME with a hub name or directory, a `save_to_disk` directory, or a .parquet file.
        option: the option with the path, for error messages.
        split: the split to read, if the data set has splits.
        config: the configuration to read; "" = the only one.
        stream: read hf:NAME without storing it.

    Raises:
        ValueError: without the package, or for a data set that does not load.
    """
    name = named(option, path)
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name} must have datasets installed: pip install datasets") from None
    location = path.removeprefix(HUB)
    if os.path.isdir(location):
        check_directory(Path(location), option)
    with _loading(name):
        if path.startswith(HUB):
            return datasets.load_dataset(location, config or None, split=split, streaming=stream)
        if path.endswith(".parquet"):
            return datasets.load_dataset("parquet", data_files=path, split="train")
        dataset = datasets.load_from_disk(path)
        return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn an error of any kind, of files, networks and builders, into one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} must be a data set that loads: {shorten_text(error)}") from None
