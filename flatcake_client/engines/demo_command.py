"""What the demos' commands have in common: arguments, what they need to be here, a spinner, the exit code.

Exit code 0: everything is as it should be; 1: not so; 3: the demo cannot run here, and says why.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatcake_client.arguments import Parser
from flatcake_client.engines.demo_processes import DemoFailed

Say = Callable[[str], None]

EXIT_DIFFERS: Final = 1
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERRUPTED: Final = 130
PIPE_COLUMNS: Final = 120  # rich assumes 80 where there is no terminal


@dataclass(frozen=True, slots=True)
class Told:
    """A demo that has run: the verdict, and two ways to say it. `show` takes a rich console."""

    proved: bool
    document: dict[str, Any]
    show: Callable[[Any], None]


def command(
    arguments: list[str] | None,
    *,
    program: str,
    description: str,
    needs: Mapping[str, str],
    tell: Callable[[Path | None, Say], Told],
) -> int:
    """Run a demo. Returns the exit code.

    Args:
        arguments: of the command line; None: this process's.
        needs: Python modules, and the extra that brings each.
        tell: runs it, in a directory of its own below the given one. May raise DemoFailed.
    """
    parser = Parser(program, description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--directory", type=Path, help="where session files go meanwhile (default: a temporary one)")
    options = parser.parse_args(arguments)
    from rich.console import Console

    # While the daemon starts it is out of reach, which is no news here.
    logging.getLogger("flatcake_client").addHandler(logging.NullHandler())
    # So that a demo that is told to stop takes its processes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    errors = Console(stderr=True, highlight=False)
    try:
        for module, extra in needs.items():
            if importlib.util.find_spec(module) is None:
                raise DemoFailed(f"{module} is not installed: pip install 'flatcake[{extra}]'")  # noqa: TRY301
        with errors.status("starting", spinner="dots") as status:
            told = tell(options.directory, status.update)
    except (DemoFailed, OSError) as error:
        errors.print(f"{program}: {error}", markup=False, soft_wrap=True)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if options.json:
        print(json.dumps(told.document, indent=2))  # noqa: T201
    else:
        told.show(Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS))
    return 0 if told.proved else EXIT_DIFFERS
