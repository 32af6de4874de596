"""The measurements behind docs/dispatch.md: `python3 -m bench.studies`."""
