"""Run the command line as `python -m lightning_hetero.cli`."""

import sys

from lightning_hetero.cli import main

sys.exit(main())
