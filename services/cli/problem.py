"""What a person did or lacks: one line that says what to do, shown without a traceback."""


class Problem(Exception):
    """`str()` is the line to print; `details` are more lines, such as the last words of a log."""

    exit_code = 1

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.details = details


class Usage(Problem):
    """An option or argument that can't be taken as it stands."""

    exit_code = 2
