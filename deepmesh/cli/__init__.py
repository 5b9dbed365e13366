"""The `deepmesh` command. One small file per command; each imports what it needs when it runs."""

import sys


def main() -> None:
    """Run the command line; errors that a user can act on are one line, not a stack."""
    from deepmesh.cli.app import app
    from deepmesh.config import ConfigError
    from deepmesh.errors import UserError

    try:
        app()
    except (UserError, ConfigError) as error:
        print(f"deepmesh: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
