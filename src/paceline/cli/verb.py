"""Verb: a command as this program understands one: no option is dropped, help comes in groups."""

from collections import Counter
from typing import Any

import click

from paceline.core.near import did_you_mean

OPTIONS = "Options"


class Verb(click.Command):
    """A command that refuses an option given twice, unless it collects what it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, count in Counter(order).items():
            if isinstance(parameter, click.Option) and not parameter.multiple and count > 1:
                flags = " / ".join([*parameter.opts, *parameter.secondary_opts])
                raise click.UsageError(f"{flags} may be given once, got {count}; keep one", ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {OPTIONS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "group", OPTIONS), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Verbs(click.Group):
    """A group of verbs that names the nearest to one that does not exist."""

    command_class = Verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            listed = f"there are {', '.join(known)}"
            ctx.fail(f"No such command {name!r}; {did_you_mean(name, known, otherwise=listed)}")
        return super().resolve_command(ctx, args)


class GroupedOption(click.Option):
    """An option with the title of its group in the help."""

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


def examples(*lines: str) -> str:
    """The epilog of a verb: commands that work as they stand."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
