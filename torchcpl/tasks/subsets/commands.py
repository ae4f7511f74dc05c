"""The subsets task as the command line knows it."""

from pathlib import Path

from torchcpl.tasks.subsets.figures import demo, report
from torchcpl.tasks.subsets.results import BENCHMARK

PACKAGE = Path(__file__).parent
SUMMARY = "representative subsets: one member of every class in a bag"

__all__ = ["BENCHMARK", "PACKAGE", "SUMMARY", "demo", "report"]
