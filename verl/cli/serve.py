"""``verl serve``: an OpenAI-compatible server for a model."""

from __future__ import annotations

import argparse
import os

from verl.cli.answering import MODEL_HELP, add_model_options, load_options, notices_to_stderr, parser
from verl.cli.arguments import port

KEY_VARIABLE = "VERL_API_KEY"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(
        "serve",
        "Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models. Requests of many clients "
        "join one running batch.",
    )
    options.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    options.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    options.add_argument("--port", type=port, default=8000, help="0 takes a free one (8000)")
    options.add_argument(
        "--served_model_name", action="append", metavar="NAME", help="what clients call it; may be repeated"
    )
    options.add_argument("--api_key", metavar="KEY", help=f"that clients must send (default: ${KEY_VARIABLE})")
    options.add_argument(
        "--log_level", default="warning", choices=LOG_LEVELS, help="of the HTTP server: info shows every request"
    )
    add_model_options(options)
    return options.parse_args(argv)


def main(argv: list[str]) -> int:
    """Serve until interrupted; the exit code."""
    arguments = parse(argv)
    with notices_to_stderr():
        from verl.serving.server import check_installed, open_port, serve

        check_installed()
        sock = open_port(arguments.host, arguments.port)
        with sock:
            from verl.serving.model import load_model

            model = load_model(arguments.model, load_options(arguments))
            names = arguments.served_model_name or [model.name]
            host, number = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"{names[0]}: {model.described}", flush=True)
            print(f"Listening on http://{shown}:{number}/v1 (Ctrl-C ends it)", flush=True)
            serve(
                model,
                sock,
                names=names,
                api_key=arguments.api_key or os.environ.get(KEY_VARIABLE),
                log_level=arguments.log_level,
            )
    return 0
