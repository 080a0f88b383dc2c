"""``verl dash DIR``: the runs of a folder in the browser, while they train."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import Arguments, port
from verl.errors import ConfigError, DataError


def main(argv: list[str]) -> int:
    """Serve until interrupted; the exit code."""
    parser = Arguments(
        prog="verl dash",
        description="Show the runs below a folder in the browser, and follow those that train. "
        "Only this machine can see it.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument("--port", type=port, default=8080, help="0 takes a free one (8080)")
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        hint = " yet: a run makes it, or name the folder of your runs" if arguments.folder == Path("runs") else ""
        raise DataError(f"there is no folder {arguments.folder}{hint}")
    from verl.tracking.dash import make_server

    try:
        server = make_server(arguments.folder, arguments.port)
    except OSError as error:
        raise ConfigError(
            f"port {arguments.port} cannot be listened on ({error.strerror or error}); choose another --port"
        ) from error
    with server:
        print(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0
