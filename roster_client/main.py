"""Entry point of the `roster` command: handles Ctrl-C before it imports the commands."""

from __future__ import annotations

from roster_common.early_interrupt import end_on_interrupt, ignore_interrupts, raise_on_interrupt


def main() -> None:
    """Runs `roster`."""
    end_on_interrupt()
    from roster_common.early_start import without_collections

    with without_collections():
        from roster_client.cli import main as run

    raise_on_interrupt()
    try:
        run()
    finally:
        ignore_interrupts()


if __name__ == "__main__":
    main()
