"""Make a file of `nanovllm tune` a file of the package, which engines use by default: `python tools/ship_tuning.py FILE.json`.

Two kinds of tile configurations are left out: those that save less than `LEAST` of a layer's time, which may be noise, and those of
attention, which `nanovllm tune` measures over short contexts only. A file is worth shipping only if `nanovllm bench` is faster with it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from nanovllm.models.tuning.file import file_name
from nanovllm.models.tuning.shipped import FOLDER

LEAST = 0.03


def shipped(document: dict[str, Any]) -> dict[str, Any]:
    """What the package keeps of a file: the key without versions and sources, and tile configurations of products."""
    changed = [line for line in document["measured"] if line.get("cut") and line["part"] != "attend"]
    lines = [line for line in changed if line["chosen_us"] <= (1 - LEAST) * line["default_us"]]
    cuts: dict[str, Any] = {}
    for line in lines:
        cuts.setdefault(str(line["rows"]), {})[line["part"]] = line["cut"]
    measured = [{name: line[name] for name in ("part", "rows", "default_us", "chosen_us")} for line in lines]
    return {
        "format": document["format"],
        "key": {name: document["key"][name] for name in ("gpu", "dtype", "shapes")},
        "cuts": cuts,
        "measured": measured,
    }


def text(document: dict[str, Any]) -> str:
    """The file: a line for each batch size and for each measurement."""
    key = json.dumps(document["key"], indent=1).replace("\n", "\n ")
    cuts = ",\n  ".join(f"{json.dumps(rows)}: {json.dumps(step)}" for rows, step in document["cuts"].items())
    measured = ",\n  ".join(map(json.dumps, document["measured"]))
    head = f'"format": {document["format"]},\n "key": {key}'
    return f'{{\n {head},\n "cuts": {{\n  {cuts}\n }},\n "measured": [\n  {measured}\n ]\n}}\n'


def main() -> None:
    """Write the file, and print its name."""
    document = shipped(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    path = FOLDER / file_name(document["key"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(text(document), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
