"""A configuration file with every setting, said in the words of `tandem serve --help`, all of them commented out."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Any

import msgspec

from tandem.cluster.config import ClusterConfig
from tandem.cluster.config_sources import SECRETS, variable

WIDTH = 110
HEAD = """\
# Every setting of a Tandem cluster, with its default. Take the # away from what you change.
#
#   tandem serve --config cluster.yaml          a flag (--port 9000) wins over the environment (TANDEM_PORT=9000),
#   tandem config --print --config cluster.yaml and that over this file; the second command shows what comes out
#
# Made by: tandem config --template

model: smollm2-135m-instruct # a folder, a .gguf file, a hub id, or this
"""


def template(parameters: list[Any]) -> str:
    """`parameters` are those of the command serve, as its parser has them."""
    known = [each for each in parameters if each.name in ClusterConfig.__struct_fields__ and each.name != "model"]
    parts = [HEAD]
    for panel, members in groupby(known, key=lambda each: each.rich_help_panel):
        parts.append(f"\n# {panel}\n" + "".join(_entry(each) for each in members))
    return "".join(parts)


def _entry(parameter: Any) -> str:
    name = parameter.name
    default = getattr(ClusterConfig(model="any"), name)
    text = parameter.help or ""
    if isinstance(parameter.show_default, str):
        text += f" Default: {parameter.show_default}."
    if name in SECRETS:
        text += f" A secret: keep it out of files, in {variable(name)}."
    lines = textwrap.wrap(text, WIDTH - 2)
    value = msgspec.json.encode(default).decode()
    return "".join(f"# {line}\n" for line in lines) + f"#{name.replace('_', '-')}: {value}\n"
