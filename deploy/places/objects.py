"""Writes several YAML documents into one file. Texts of several lines become YAML blocks (`|`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from shared.config.model import Hidden


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Hidden, _text)


def dump(header: str, documents: Iterable[Mapping[str, Any]]) -> str:
    """Return `header` (lines of comment), followed by the documents as YAML."""
    return header + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
