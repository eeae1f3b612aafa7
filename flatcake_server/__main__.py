"""Where the `flatcake` command begins: what it is made of takes a second to load, and ^C in that second is no error either."""

from __future__ import annotations


def main() -> None:
    try:
        from flatcake_server import cli
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as `cli` says it later
    cli.main()


if __name__ == "__main__":
    main()
