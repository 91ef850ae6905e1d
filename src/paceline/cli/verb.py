"""Verb: a command as this program understands one: no option is dropped."""

from collections import Counter

import click


class Verb(click.Command):
    """A command that refuses an option given twice, unless it collects what it is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, count in Counter(order).items():
            if isinstance(parameter, click.Option) and not parameter.multiple and count > 1:
                flags = " / ".join([*parameter.opts, *parameter.secondary_opts])
                raise click.UsageError(f"{flags} may be given once, got {count}; keep one", ctx)
        return super().parse_args(ctx, args)
