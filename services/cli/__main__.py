"""The `forebay` command. Errors that a person can mend are one line on stderr; nothing else decides exit codes."""

import sys

_OLDEST = (3, 11)
_NEWEST = (3, 13)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a problem, 2 wrong usage, 130 interrupted."""
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        have = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"forebay: this is Python {have}, and Forebay needs 3.11, 3.12 or 3.13: make its virtual environment with one of those")
    # Imported late, so that a wrong Python gets the line above and not a syntax error.
    try:
        from services.cli.app import run_app
    except ModuleNotFoundError as error:
        sys.exit(f"forebay: the command needs more than the client ({error.name} is missing): pip install 'forebay[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_app())


if __name__ == "__main__":
    main()
