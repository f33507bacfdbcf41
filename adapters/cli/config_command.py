"""`pagemill config`: the merged settings, in a form that pagemill.toml understands."""

from __future__ import annotations

import argparse

from pagemill.adapters.cli.settings import Settings, settings_table, shown


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print every setting with its source; wrong values are errors here as everywhere."""
    settings.engine(), settings.queue(), settings.gateway(), settings.webhook(), settings.process()
    group = ""
    for name, setting in settings_table().items():
        if setting.group != group:
            group = setting.group
            print(f"# {group}")
        value = settings.values[name]
        line = f"# {name} is not set" if value is None else f"{name} = {shown(value)}"
        if setting.secret and value is not None:
            line = f"# {name} is set and not shown"
        print(f"{line:<48}  # {settings.sources[name]}")
    return 0
