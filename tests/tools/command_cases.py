"""The command line in this process, for tests of commands."""

from typer.testing import CliRunner

from jdag.cli.commands import app


def command(*words: object) -> tuple[int, str, str]:
    """Run a command: (exit code, stdout, stderr)."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr
