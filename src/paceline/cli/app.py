"""The `paceline` command: names, one-line helps and lazy loading of the verbs.

Help of the group is static, so that `paceline --help` imports no verb and no torch.
"""

from importlib import import_module

import click

from paceline.cli.verb import Verbs
from paceline.core.errors import PacelineError
from paceline.core.progress import INTERRUPTED

VERBS = {
    "bench": ("paceline.cli.bench:bench", "Time this machine."),
    "chat": ("paceline.cli.chat:chat", "Talk with a model."),
    "check": ("paceline.cli.check:check", "Prove attention backends, cell by cell."),
    "debug": ("paceline.cli.debug:debug", "Run a failure again; list past bugs."),
    "env": ("paceline.cli.env:env", "Show this machine and which backends are live."),
    "explain": ("paceline.cli.explain:explain", "Plan a model on a device, before loading it."),
    "generate": ("paceline.cli.generate:generate", "Complete a prompt."),
    "prove": ("paceline.cli.prove:prove", "Prove that speculation leaves the text as it is."),
    "serve": ("paceline.cli.serve:serve", "Serve a model over HTTP, as the OpenAI API."),
}


class CommandFailure(click.ClickException):
    """A PacelineError as the command line shows it: type, text, exit code 2."""

    exit_code = 2

    def __init__(self, error: PacelineError) -> None:
        super().__init__(str(error))
        self._name = type(error).__name__

    def show(self, file: object = None) -> None:
        click.echo(f"{self._name}: {self.message}", err=True)


class LazyGroup(Verbs):
    """Finds a verb's module when the verb is called; turns typed errors into exit code 2 and Ctrl-C
    into 130.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(VERBS.items())])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            raise CommandFailure(error) from error
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def show_version(ctx: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from paceline.plan.machine import installed

        click.echo(f"paceline {installed(['paceline'])['paceline'] or 'from source'}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 100,
    },
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_version,
    help="Show the version and exit.",
)
def app() -> None:
    """An LLM inference engine.  Underscores in flags equal dashes."""


def main() -> None:
    """Entry point of the installed command."""
    app(prog_name="paceline")
