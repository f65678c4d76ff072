"""The directive ``command-help``: one section for each command of ``ipcsync``, from what the command itself knows."""

from __future__ import annotations

from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ipcsync.cli import ipcsync


def _commands(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """(full name, its --help) of a command and of all below it that are not hidden."""
    found = [(context.command_path, command.get_help(context))]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                made = click.Context(below, info_name=name, parent=context, terminal_width=100, max_content_width=100)
                found += _commands(below, made)
    return found


class CommandHelp(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        root = click.Context(ipcsync, info_name="ipcsync", terminal_width=100, max_content_width=100)
        sections: list[nodes.Node] = []
        for name, text in _commands(ipcsync, root):
            section = nodes.section(ids=[nodes.make_id(name)])
            section += nodes.title(text=name)
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
