"""Flags that take several words after them, as `--goodput ttft:200 tpot:50`, which click does not know.

It imports nothing but click, for `tokenpipe --help` reads it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import click

ANY = re.compile(r".*", re.DOTALL)  # where no word can stand for anything else


class CommandOfSeveral(click.Command):
    """Takes `--flag one two` for `--flag one --flag two`. `several`: the flags, and what a further word of each looks like."""

    several: ClassVar[Mapping[str, re.Pattern[str]]] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args, self.several))


def repeat_flags(args: list[str], several: Mapping[str, re.Pattern[str]]) -> list[str]:
    """Each further word of a flag that takes several gets the flag before it. Raises click.BadOptionUsage where there is none:
    click would take the next flag for one."""
    repeated: list[str] = []
    flag, taken = "", 0  # the flag whose words these are, and how many it has had
    for position, word in enumerate(args):
        if word == "--":
            return repeated + args[position:]
        name, equals, _ = word.partition("=")
        if word.startswith("--") and flag and not taken:
            raise click.BadOptionUsage(flag, f"{flag}: found no word after it, but {name}; expected at least one")
        if word.startswith("-"):
            flag, taken = (name, int(bool(equals))) if name in several else ("", 0)
        elif flag:
            if taken and not several[flag].fullmatch(word):
                flag = ""
            elif taken:
                repeated.append(flag)
            taken += 1
        repeated.append(word)
    return repeated
