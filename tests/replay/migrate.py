"""Rewrite recorded logs after a rename, so that they replay again.

    python migrate.py MAPPING.json [--folder recorded] [--to FOLDER] [--reverse]

The mapping has any of these parts, each from the old name to the new one:

    {"types":    {"Arrive": "AddRequest"},
     "fields":   {"Arrive.resumed": "generated_prefix", "Arrive.sampling.seed": "random_seed"},
     "values":   {"Arrive.part": {"prefill": "prompt"}},
     "commands": {"Step": "RunStep", "Open": ["OpenRow", [0, 2, 1, 3, 4]]},
     "settings": {"max_running": "max_running_requests"}}

`types`: classes of events. `fields`: of events, by their old names all the way; after a further
dot, those of what a field holds. `values`: texts in such fields. `commands`: classes of commands
and of outputs; with a list, also in which order the old places now stand (fields.json says what
they were called). `settings`: names of settings in cases.json.

Everything is checked before anything is written: an entry that is nowhere in the logs is refused,
and so is a field whose new name is there already.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("types", "fields", "values", "commands", "settings")


class MappingError(ValueError):
    """The mapping does not suit the logs; the message names the entry."""


@dataclass
class Mapping:
    """`used`: entries that were met, as (part, key)."""

    types: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    commands: dict[str, str | list[Any]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Mapping:
        tree = json.loads(path.read_text(encoding="utf-8"))
        unknown = set(tree) - set(PARTS)
        if unknown:
            raise MappingError(f"{path}: unknown part {', '.join(sorted(unknown))}")
        return cls(**tree)

    def reversed(self) -> Mapping:
        """From the new names to the old ones."""
        return Mapping(
            types={new: old for old, new in self.types.items()},
            fields={self._path(key): key.rpartition(".")[2] for key in self.fields},
            values={
                self._path(key): {new: old for old, new in texts.items()}
                for key, texts in self.values.items()
            },
            commands=dict(map(turned, self.commands.items())),
            settings={new: old for old, new in self.settings.items()},
        )

    def _path(self, key: str) -> str:
        """Where the field that was at `key` is now."""
        kind, *names = key.split(".")
        now = [self.types.get(kind, kind)]
        for depth in range(len(names)):
            before = ".".join((kind, *names[: depth + 1]))
            now.append(self.fields.get(before, names[depth]))
        return ".".join(now)

    # ------------------------------------------------------------ what is in a line

    def event(self, raw: dict[str, Any]) -> dict[str, Any]:
        kind = raw["type"]
        new = self._renamed("types", kind, kind)
        return {"type": new} | self._fields(kind, {k: v for k, v in raw.items() if k != "type"})

    def command(self, raw: list[Any]) -> list[Any]:
        name, places = raw
        new = self.commands.get(name, name)
        if name in self.commands:
            self.used.add(("commands", name))
        if isinstance(new, str):
            return [new, places]
        name, order = new
        if sorted(order) != list(range(len(places))):
            raise MappingError(f"commands: {name} has {len(places)} places, and the order {order}")
        return [name, [places[old] for old in order]]

    def _fields(self, path: str, raw: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in raw.items():
            here = f"{path}.{name}"
            new = self._renamed("fields", here, name)
            if new in result or (new != name and new in raw and f"{path}.{new}" not in self.fields):
                raise MappingError(f"fields: {here} is to be {new}, which is there already")
            result[new] = self._value(here, value)
        return result

    def _value(self, path: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self._fields(path, value)
        texts = self.values.get(path, {})
        if isinstance(value, str) and value in texts:
            self.used.add(("values", path))
            return texts[value]
        return value

    def setting(self, name: str) -> str:
        return self._renamed("settings", name, name)

    def _renamed(self, part: str, key: str, name: str) -> str:
        names: dict[str, str] = getattr(self, part)
        if key not in names:
            return name
        self.used.add((part, key))
        return names[key]

    def unused(self) -> list[str]:
        keys = ((part, key) for part in PARTS for key in getattr(self, part))
        return [f"{part}: {key}" for part, key in keys if (part, key) not in self.used]


def turned(item: tuple[str, str | list[Any]]) -> tuple[str, str | list[Any]]:
    old, new = item
    if isinstance(new, str):
        return new, old
    name, order = new
    return name, [old, [order.index(place) for place in range(len(order))]]


# ------------------------------------------------------------ files


def read_lines(path: Path) -> list[Any]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def packed(rows: list[Any]) -> bytes:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def migrated(folder: Path, mapping: Mapping) -> Iterator[tuple[str, bytes]]:
    """The files of `folder` by their names, with the new names in them."""
    for path in sorted(folder.iterdir()):
        kind = path.name.partition(".")[2]
        if kind == "events.jsonl.xz":
            turns = read_lines(path)
            yield path.name, packed([[now, list(map(mapping.event, raw))] for now, raw in turns])
        elif kind in ("commands.jsonl.xz", "outputs.jsonl.xz"):
            yield path.name, packed([list(map(mapping.command, turn)) for turn in read_lines(path)])
        elif path.name == "cases.json" and mapping.settings:
            cases = json.loads(path.read_text(encoding="utf-8"))
            for case in cases.values():
                case["settings"] = {mapping.setting(k): v for k, v in case["settings"].items()}
            yield path.name, (json.dumps(cases, indent=1) + "\n").encode()
        else:
            yield path.name, path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Rewrite recorded logs after a rename.")
    parser.add_argument("mapping", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "recorded")
    parser.add_argument("--to", type=Path, help="write there, and leave the folder as it is")
    parser.add_argument("--reverse", action="store_true", help="from the new names to the old ones")
    args = parser.parse_args()
    mapping = Mapping.read(args.mapping)
    if args.reverse:
        mapping = mapping.reversed()
    files = dict(migrated(args.folder, mapping))
    unused = mapping.unused()
    if unused:
        raise MappingError(f"nowhere in the logs: {', '.join(unused)}")
    target = args.to or args.folder
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (target / name).write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values())) / 1000:.0f} kB, in {target}")


if __name__ == "__main__":
    main()
